"""The largest Llama whose adapters train over a base in NF4, in a real memory limit, on both sides
with gradient checkpointing. Each attempt is a process of its own inside the limit; blocks of one
width, so that what grows is the number.
"""

import importlib.util
import math
from collections.abc import Iterator

from .attempt import command, completed, dtype_name
from .capacity import LIMIT_BYTES, SSD_BYTES, check_room
from .common import MIB, Context, Figure
from .limit import Runner, limited_runner
from .models import parameter_count

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
    numbers = {"hidden": hidden, "layers": layers, "tokens": TOKENS, "seed": context.seed}
    with context.scratch() as folder:
        budgets = {"device_bytes": DEVICE_BYTES, "host_bytes": HOST_BYTES, "ssd_bytes": SSD_BYTES}
        more = {"steps": STEPS, "ssd_path": folder, "adapters": True, "checkpointing": True}
        done = run(command(side, **numbers, **budgets, **more), LIMIT_BYTES)
    what = f"{side}: {parameter_count(hidden, layers) / 1e9:.2f} B ({layers} blocks)"
    return completed(done, what, context.say)


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
        if side == "bitsandbytes" and importlib.util.find_spec(side) is None:
            context.say("bitsandbytes is not installed: its side is left out")
            continue
        best = largest(side, context, limited)
        bound = (SSD_BYTES + LIMIT_BYTES) / BYTES_PER_PARAMETER if side == "strata" else None
        target = TARGET if side == "strata" else None
        name = f"{side}_parameters"
        yield Figure("qlora-capacity", name, best, "parameters", target, bound, "higher")
