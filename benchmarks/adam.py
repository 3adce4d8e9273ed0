"""The optimizer kernel on plain memory: against torch's fused AdamW, and against a loop that reads
and writes the same bytes and computes nothing, which is as fast as memory allows.
"""

import os
import statistics
import subprocess
from collections.abc import Callable, Iterator

import torch

from .common import ROOT, BenchError, Context, Figure, median_ratio, seconds_of, take_turns

COUNT = 64 << 20  # far beyond every cache
LOOP = ROOT / "build/release/benchmarks/adam_loop"
# Read and written: bfloat16 parameter, 16-bit residual, two moments; read: bfloat16 gradient.
BYTES_PER_PARAMETER = 2 * (2 + 2 + 4 + 4) + 2
TORCH_BYTES_PER_PARAMETER = 2 * (4 + 4 + 4) + 4  # the same in float32


def strata_side(count: int, threads: int) -> Callable[[], float]:
    """Seconds of one update of `count` parameters by strata."""
    from strata._core import GroupSpec, update_span

    group: GroupSpec = {
        "rule": "adamw",
        "lr": 1e-5,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
    }
    param = torch.randn(count).bfloat16()
    residual = torch.zeros(count, dtype=torch.int16)
    moment1, moment2 = torch.zeros(count), torch.zeros(count)
    gradient = torch.randn(count).bfloat16()
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        update_span(
            group,
            dtype="bfloat16",
            grad_dtype="bfloat16",
            count=count,
            param=param.data_ptr(),
            master=residual.data_ptr(),
            moment1=moment1.data_ptr(),
            moment2=moment2.data_ptr(),
            grad=gradient.data_ptr(),
            step=step,
            grad_scale=1.0,
            threads=threads,
            isa="best",
        )

    return lambda: seconds_of(update)


def torch_side(count: int, dtype: torch.dtype) -> Callable[[], float]:
    """Seconds of one update by torch.optim.AdamW(fused=True)."""
    param = torch.nn.Parameter(torch.randn(count, dtype=dtype))
    param.grad = torch.randn(count, dtype=dtype)
    optimizer = torch.optim.AdamW([param], lr=1e-5, weight_decay=0.1, fused=True)
    return lambda: seconds_of(optimizer.step)


def loop_side(count: int, threads: int) -> Callable[[], float]:
    """Seconds of one pass of the loop, the best of a few, as it reports them."""
    if not LOOP.exists():
        raise BenchError(f"{LOOP} is not built")

    def run() -> float:
        command = [str(LOOP), str(count), str(threads)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return run


def run(context: Context) -> Iterator[Figure]:
    """Yields nanoseconds and bytes per parameter of each side, and their ratios."""
    count = 1 << 20 if context.quick else COUNT
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    sides = {
        "strata": strata_side(count, threads),
        "torch": torch_side(count, torch.float32),
        "torch_bfloat16": torch_side(count, torch.bfloat16),
        "loop": loop_side(count, threads),
    }
    for side in sides.values():
        side()  # touches every page
    taken = take_turns(sides, context.rounds * 3, context.say)
    bound = statistics.median(taken["loop"]) / count * 1e9
    for name, seconds in taken.items():
        nanoseconds = statistics.median(seconds) / count * 1e9
        yield Figure(
            "adam",
            f"{name}_time",
            nanoseconds,
            "ns/parameter",
            bound=bound if name == "strata" else None,
        )
    yield Figure("adam", "strata_bytes", BYTES_PER_PARAMETER, "bytes/parameter")
    yield Figure("adam", "torch_bytes", TORCH_BYTES_PER_PARAMETER, "bytes/parameter")
    speed = 100 * median_ratio(taken["loop"], taken["strata"])
    yield Figure("adam", "of_loop", speed, "%", target=95, bound=100, better="higher")
    over = median_ratio(taken["torch"], taken["strata"])
    yield Figure("adam", "speed_over_torch", over, "ratio", better="higher")
