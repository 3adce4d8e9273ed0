"""The largest Llama that trains inside a real memory limit, found by growing the model until it
fails. Each attempt is a process of its own inside the limit.
"""

import shutil
from collections.abc import Iterator

from .attempt import command, completed
from .common import GIB, MIB, BenchError, Context, Figure
from .limit import Runner, limited_runner
from .models import parameter_count

LIMIT_BYTES = 2 * GIB
SSD_BYTES = 20 * 10**9
TOKENS, STEPS = 128, 3
# Of the 2 GiB, Python and PyTorch take about 0.5; activations, gradients of one unit on their way
# out and the logits take the rest of what is not listed here.
DEVICE_BYTES, HOST_BYTES = 256 * MIB, 640 * MIB
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
    numbers = {"hidden": hidden, "layers": layers, "tokens": TOKENS, "seed": context.seed}
    with context.scratch() as folder:
        budgets = {"device_bytes": DEVICE_BYTES, "host_bytes": HOST_BYTES, "ssd_bytes": SSD_BYTES}
        done = run(command(side, steps=STEPS, ssd_path=folder, **numbers, **budgets), LIMIT_BYTES)
    what = f"{side}: {parameter_count(hidden, layers) / 1e9:.3f} B ({hidden} x {layers})"
    return completed(done, what, context.say)


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
