"""The largest Llama whose adapters train over a base in NF4, in a real memory limit, on both sides
with gradient checkpointing. Each attempt is a process of its own inside the limit; blocks of one
width, so that what grows is the number.
"""

import json
import math
import sys
from collections.abc import Iterator

from .capacity import LIMIT_BYTES, SSD_BYTES, check_room, last_line
from .common import MIB, Context, Figure
from .limit import Runner, limited_runner
from .models import parameter_count
from .qlora import dtype_name

TOKENS = 32
STEPS = 3
HIDDEN = {"bfloat16": 4096, "float32": 2048}  # a block is computed from 400 MB, or from 200
# In each attempt, until one fails.
BILLIONS = {"strata": (25.1, 28.0, 31.0, 34.0), "bitsandbytes": (1.2, 1.6, 2.0, 2.4, 2.8, 3.2)}
# Python, PyTorch and PEFT take about 0.6 of the 2 GiB; activations the rest of what is not here.
DEVICE_BYTES = 640 * MIB
HOST_BYTES = 320 * MIB
TARGET = 25e9
BYTES_PER_PARAMETER = 0.516  # codes, scales of 8 bits, and their groups
QUICK_BILLIONS = 0.1


def shape_for(billions: float) -> tuple[int, int]:
    """(hidden, layers) of at least so many parameters."""
    hidden = HIDDEN[dtype_name()]
    beside = parameter_count(hidden, 0)
    return hidden, math.ceil((billions * 1e9 - beside) / (parameter_count(hidden, 1) - beside))


def attempt(side: str, shape: tuple[int, int], context: Context, run: Runner) -> bool:
    """Whether the steps of a model of this shape complete with finite losses."""
    hidden, layers = shape
    count = parameter_count(hidden, layers)
    numbers = {"hidden": hidden, "layers": layers, "tokens": TOKENS, "steps": STEPS}
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
    for billions in (QUICK_BILLIONS,) if context.quick else BILLIONS[side]:
        shape = shape_for(billions)
        if not attempt(side, shape, context, run):
            break
        best = parameter_count(*shape)
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
