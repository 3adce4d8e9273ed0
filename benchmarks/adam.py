"""The optimizer kernel on plain memory: against torch's fused AdamW, and against a loop that reads
and writes the same bytes and computes nothing, which is as fast as memory allows.
"""

import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .common import ROOT, BenchError, Context, Figure, median_ratio, seconds_of, take_turns

if TYPE_CHECKING:
    from strata._core import GroupSpec

COUNT = 64 << 20  # far beyond every cache
LOOP = ROOT / "build/release/benchmarks/adam_loop"
# Parameter (with its residual) and two moments are read and written, the gradient is read.
BYTES_PER_PARAMETER = {
    "strata": 2 * (2 + 2 + 4 + 4) + 2,
    "torch_float32": 2 * (4 + 4 + 4) + 4,
    "torch_bfloat16": 2 * (2 + 2 + 2) + 2,
}


def strata_side(count: int, threads: int) -> Callable[[], float]:
    """Seconds of one update of `count` parameters by strata."""
    from strata._core import update_span

    group: GroupSpec = {
        "rule": "adamw",
        "lr": 1e-5,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "momentum": 0.0,
        "dampening": 0.0,
        "lr_decay": 0.0,
        "initial_accumulator": 0.0,
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
            "bfloat16",
            "bfloat16",
            count,
            param.data_ptr(),
            residual.data_ptr(),
            moment1.data_ptr(),
            moment2.data_ptr(),
            gradient.data_ptr(),
            step,
            1.0,
            threads,
            "best",
        )

    return lambda: seconds_of(update)


def torch_side(count: int, dtype: torch.dtype) -> Callable[[], float]:
    """Seconds of one update by torch.optim.AdamW(fused=True)."""
    param = torch.nn.Parameter(torch.randn(count, dtype=dtype))
    param.grad = torch.randn(count, dtype=dtype)
    optimizer = torch.optim.AdamW([param], lr=1e-5, weight_decay=0.1, fused=True)
    return lambda: seconds_of(optimizer.step)


def loop_figures(count: int, threads: int, turns: int) -> Iterator[Figure]:
    """The kernel against a loop that reads and writes the same bytes and computes nothing: what
    benchmarks/adam_loop.cpp prints.
    """
    if not LOOP.exists():
        raise BenchError(f"{LOOP} is not built")
    sizes = {"params": count, "threads": threads, "turns": turns}
    command = [str(LOOP), *itertools.chain(*((f"--{k}", str(v)) for k, v in sizes.items()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        figure = json.loads(line)
        yield Figure(**figure, better="lower" if figure["unit"] == "ns" else "higher")


def run(context: Context) -> Iterator[Figure]:
    """Yields nanoseconds and bytes per parameter of each side, and their ratios."""
    count = 1 << 20 if context.quick else COUNT
    threads = len(os.sched_getaffinity(0))
    turns = context.rounds * 3
    yield from loop_figures(count, threads, turns)
    torch.set_num_threads(threads)
    sides = {
        "strata": strata_side(count, threads),
        "torch_float32": torch_side(count, torch.float32),
        "torch_bfloat16": torch_side(count, torch.bfloat16),
    }
    for side in sides.values():
        side()  # touches every page
    taken = take_turns(sides, turns, context.say)
    for name, seconds in taken.items():
        nanoseconds = statistics.median(seconds) / count * 1e9
        yield Figure("adam", f"{name}_time", nanoseconds, "ns/parameter")
        yield Figure("adam", f"{name}_bytes", BYTES_PER_PARAMETER[name], "bytes/parameter")
    over = median_ratio(taken["torch_float32"], taken["strata"])
    yield Figure("adam", "speed_over_torch_float32", over, "ratio", better="higher")
