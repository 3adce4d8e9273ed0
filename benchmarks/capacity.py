"""The largest Llama that trains inside a real memory limit, found by growing the model until it
fails. Each attempt is a process of its own inside the limit.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .common import GIB, MIB, BenchError, Context, Figure
from .limit import Runner, limited_runner
from .models import parameter_count

LIMIT_BYTES = 2 * GIB
SSD_BYTES = 20 * 10**9
TOKENS = 128
GROWTH = 1.1
TARGET = 1.2e9
START = 20e6
BYTES_PER_PARAMETER = 14  # parameter, gradient, residual, two moments

WIDTHS = (256, 512, 1024, 2048)


def shape_for(parameters: float) -> tuple[int, int]:
    """(hidden, layers) of about that many parameters: the widest that is at least 8 layers deep."""
    for hidden in reversed(WIDTHS):
        block = parameter_count(hidden, 1) - parameter_count(hidden, 0)
        layers = round((parameters - parameter_count(hidden, 0)) / block)
        if layers >= 8:
            return hidden, layers
    return WIDTHS[0], max(1, layers)


def attempt(side: str, shape: tuple[int, int], context: Context, run: Runner) -> bool:
    """Whether three steps of a model of this shape complete with finite losses."""
    hidden, layers = shape
    count = parameter_count(hidden, layers)
    with context.scratch() as folder:
        done = run(child_command(side, shape, context.seed, folder), LIMIT_BYTES)
    if done.returncode != 0:
        reason = "killed by the limit" if done.returncode == -9 else last_line(done.stderr)
        context.say(f"{side}: {count / 1e9:.3f} B ({hidden} x {layers}): {reason}")
        return False
    report = json.loads(done.stdout.splitlines()[-1])
    seconds = report["seconds"][-1]
    context.say(f"{side}: {count / 1e9:.3f} B ({hidden} x {layers}): ok, {seconds:.1f} s a step")
    return all(math.isfinite(loss) for loss in report["losses"])


def child_command(side: str, shape: tuple[int, int], seed: int, folder: Path) -> list[str]:
    """The command line of one attempt."""
    hidden, layers = shape
    numbers = {"hidden": hidden, "layers": layers, "tokens": TOKENS, "seed": seed}
    return [
        *(sys.executable, "-m", "benchmarks.capacity_child", side),
        *(f"--{name}={number}" for name, number in numbers.items()),
        *(f"--ssd-bytes={SSD_BYTES}", f"--ssd-path={folder}"),
    ]


def last_line(text: str) -> str:
    """The end of an error message."""
    return (text.strip().splitlines() or ["failed without a word"])[-1]


def grown(size: float, factor: float) -> float:
    """The next size that makes a larger model."""
    larger = size
    while shape_for(larger) == shape_for(size):
        larger *= factor
    return larger


def largest(side: str, context: Context, run: Runner) -> int:
    """Parameters of the largest model that completes; 0 where none does. Grows it twofold until one
    fails, then by a tenth from the last that did not.
    """
    best, size = 0.0, START
    for factor in (2.0, GROWTH):
        while attempt(side, shape_for(size), context, run):
            best, size = size, grown(size, factor)
            if context.quick:
                break
        if context.quick or not best:
            break
        size = grown(best, GROWTH)
    return parameter_count(*shape_for(best)) if best else 0


def check_room(context: Context) -> None:
    """Raises BenchError where the SSD has no room for the largest model."""
    free = shutil.disk_usage(context.ssd_path).free
    if free < SSD_BYTES + 512 * MIB and not context.quick:
        raise BenchError(f"{context.ssd_path} has {free / 1e9:.1f} GB free, 20.5 are needed")


def run(context: Context) -> Iterator[Figure]:
    """Yields the parameters that fit, for both sides."""
    limited = limited_runner()
    check_room(context)
    for side in ("plain", "strata"):
        best = largest(side, context, limited)
        target = TARGET if side == "strata" else None
        bound = (SSD_BYTES + LIMIT_BYTES) / BYTES_PER_PARAMETER if side == "strata" else None
        yield Figure("capacity", f"{side}_parameters", best, "parameters", target, bound, "higher")
