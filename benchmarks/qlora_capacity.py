"""The largest Llama whose adapters train over a base in NF4, in a real memory limit. Each attempt
is a process of its own inside the limit; blocks of one width, so that what grows is the number.
"""

import json
import math
import sys
from collections.abc import Iterator

from .capacity import LIMIT_BYTES, SSD_BYTES, check_room, last_line
from .common import MIB, Context, Figure
from .limit import Runner, limited_runner
from .models import parameter_count

TOKENS = 32
STEPS = 3
HIDDEN = 4096
# Blocks in each attempt, until one fails: of 199 M parameters.
LAYERS = {"strata": (126, 140, 155, 170), "bitsandbytes": (6, 8, 10, 12, 14, 16)}
# Python, PyTorch and PEFT take about 0.6 of the 2 GiB; activations the rest of what is not here.
DEVICE_BYTES = 640 * MIB
HOST_BYTES = 320 * MIB
TARGET = 25e9
BYTES_PER_PARAMETER = 0.516  # codes, scales of 8 bits, and their groups
QUICK_LAYERS = 1


def attempt(side: str, layers: int, context: Context, run: Runner) -> bool:
    """Whether the steps of a model of so many blocks complete with finite losses."""
    count = parameter_count(HIDDEN, layers)
    numbers = {"hidden": HIDDEN, "layers": layers, "tokens": TOKENS, "steps": STEPS}
    numbers |= {"seed": context.seed, "device-bytes": DEVICE_BYTES, "host-bytes": HOST_BYTES}
    with context.scratch() as folder:
        done = run(
            [
                *(sys.executable, "-m", "benchmarks.qlora", side, "--limited"),
                *(f"--{name}={number}" for name, number in numbers.items()),
                *(f"--ssd-bytes={SSD_BYTES}", f"--ssd-path={folder}"),
            ],
            LIMIT_BYTES,
        )
    if done.returncode != 0:
        reason = "killed by the limit" if done.returncode == -9 else last_line(done.stderr)
        context.say(f"{side}: {count / 1e9:.2f} B ({layers} blocks): {reason}")
        return False
    report = json.loads(done.stdout.splitlines()[-1])
    context.say(
        f"{side}: {count / 1e9:.2f} B ({layers} blocks): ok, {report['setup']:.0f} s to begin, "
        f"{report['seconds'][-1]:.1f} s a step"
    )
    return all(math.isfinite(loss) for loss in report["losses"])


def largest(side: str, context: Context, run: Runner) -> int:
    """Parameters of the largest model that completes; 0 where none does."""
    best = 0
    for layers in (QUICK_LAYERS,) if context.quick else LAYERS[side]:
        if not attempt(side, layers, context, run):
            break
        best = parameter_count(HIDDEN, layers)
    return best


def run(context: Context) -> Iterator[Figure]:
    """Yields the parameters of the base that fit, for both sides."""
    limited = limited_runner()
    check_room(context)
    for side in ("bitsandbytes", "strata"):
        if side == "bitsandbytes" and not _has_bitsandbytes():
            context.say("bitsandbytes is not installed: its side is left out")
            continue
        best = largest(side, context, limited)
        bound = (SSD_BYTES + LIMIT_BYTES) / BYTES_PER_PARAMETER if side == "strata" else None
        target = TARGET if side == "strata" else None
        name = f"{side.replace('-', '_')}_parameters"
        yield Figure("qlora-capacity", name, best, "parameters", target, bound, "higher")


def _has_bitsandbytes() -> bool:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return False
    return True
