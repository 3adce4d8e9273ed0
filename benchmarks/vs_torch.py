"""Steps of a 1.3 B Llama, 16,384 tokens each: strata with a quarter of its state on the GPU against
plain PyTorch with fused AdamW, which has everything there.

strata's device budget is a quarter of its parameters, gradients, residuals and moments, and what
PyTorch holds in a step of the plain side beside its own. Each side is a process, for strata limits
PyTorch's memory in its process; they take turns, and give PyTorch's cache back behind each. Full
size needs about 60 GB of device memory and 30 GB of host memory.
"""

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

from .common import Context, Figure, median_ratio, take_turns
from .device import full_size_needs_gpu
from .models import parameter_count
from .peers.child import Child
from .vs_torch_child import FULL, QUICK

SHARE = 0.25
STATE_BYTES = 14  # a parameter: itself, its gradient, its residual and two moments
THROUGHPUT_MIN = 95.0  # percent of plain PyTorch's
WARM_UP_STEPS = 6  # until a plan is in use, and has been measured
MODES = ("on_step", "in_backward")


def open_side(context: Context, name: str, device_bytes: int = 0) -> Child:
    """Starts "plain", or strata in an update mode."""
    options = [name, f"--device={context.device}", f"--seed={context.seed}"]
    options += [f"--device-bytes={device_bytes}", *(["--quick"] if context.quick else [])]
    return Child([sys.executable, "-m", "benchmarks.vs_torch_child", *options], os.environ)


def asking(child: Child) -> Callable[[], float]:
    """Seconds of a step of a child, in a turn."""
    return lambda: float(child.ask("turn")["seconds"])


def run(context: Context) -> Iterator[Figure]:
    """Yields tokens a second of every side, and strata's share of plain PyTorch's."""
    full_size_needs_gpu(context)
    setting = QUICK if context.quick else FULL
    parameters = parameter_count(setting.hidden, setting.layers, setting.vocabulary)
    with ExitStack() as stack:
        children = {"plain": stack.enter_context(closing(open_side(context, "plain")))}
        held = int(children["plain"].ask("held")["bytes"])
        device_bytes = int(SHARE * STATE_BYTES * parameters * setting.room) + held
        context.say(f"{parameters / 1e9:.2f} B parameters; strata has {device_bytes / 1e9:.2f} GB")
        for mode in MODES:
            child = stack.enter_context(closing(open_side(context, mode, device_bytes)))
            losses = [float(child.ask("warm")["loss"]) for _ in range(WARM_UP_STEPS)]
            context.say(f"{mode}: losses {', '.join(f'{loss:.3f}' for loss in losses)}")
            children[mode] = child
        sides = {name: asking(child) for name, child in children.items()}
        taken = take_turns(sides, context.rounds, context.say)
    yield Figure("vs-torch", "activations", held / 1e9, "GB")
    for name, seconds in taken.items():
        rate = setting.tokens / statistics.median(seconds)
        yield Figure("vs-torch", f"{name}_tokens", rate, "tokens/s", better="higher")
    for mode in MODES:
        percent = 100 * median_ratio(taken["plain"], taken[mode])
        target = None if context.quick else THROUGHPUT_MIN
        yield Figure("vs-torch", f"{mode}_of_plain", percent, "%", target, 100, "higher")
