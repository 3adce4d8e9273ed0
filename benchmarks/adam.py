"""The optimizer kernel on plain memory. Against a loop that reads and writes the same bytes and
computes nothing, which is as fast as memory allows: what benchmarks/adam_loop.cpp prints, by
instruction set and threads. And one update of 100 million parameters, bfloat16 gradient in and
bfloat16 parameter out, against DeepSpeed's CPU Adam and torch's fused AdamW with the casts that
they need, and the loop. All take turns, with their memory in huge pages, as strata's frames are.
"""

import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch

from .common import (
    ROOT,
    BenchError,
    Context,
    Figure,
    median_ratio,
    seconds_of,
    share_of_best,
    take_turns,
)
from .peers import environment
from .peers.child import Child

if TYPE_CHECKING:
    from strata._core import GroupSpec

COUNT, PEER_COUNT = 64 << 20, 100_000_000  # far beyond every cache
LOOP = ROOT / "build/release/benchmarks/adam_loop"
WARM_UP_TURNS = 2
# Parameter (with its residual) and two moments are read and written, the gradient is read.
BYTES = 2 * (2 + 2 + 4 + 4) + 2
# With a float32 master: gradient read and its copy written; parameter and two moments read and
# written, the copy read; parameter read and its 16-bit form written.
MASTER_BYTES = (2 + 4) + (2 * (4 + 4 + 4) + 4) + (4 + 2)
BYTES_OF = {"strata": BYTES, "loop": BYTES, "deepspeed": MASTER_BYTES, "torch": MASTER_BYTES}
TARGET_OVER_DEEPSPEED = 1.3
TARGET_OF_LOOP = 95.0


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
    threads = len(os.sched_getaffinity(0))
    yield from loop_figures(1 << 20 if context.quick else COUNT, threads, context.rounds * 3)
    python = environment.python(context)
    count = 1 << 20 if context.quick else PEER_COUNT
    env = {**environment.variables(threads), "THP_MEM_ALLOC_ENABLE": "1"}
    sizes = [f"--count={count}", f"--threads={threads}"]
    commands = [
        [str(python), "-m", "benchmarks.peers.optimizers", *sizes],
        [str(LOOP), "--serve", "1", "--params", str(count), "--threads", str(threads)],
    ]
    with ExitStack() as stack:
        optimizers, loop = (stack.enter_context(closing(Child(each, env))) for each in commands)
        sides = {name: asking(loop if name == "loop" else optimizers, name) for name in BYTES_OF}
        take_turns(sides, WARM_UP_TURNS, lambda text: None)  # touches every page
        taken = take_turns(sides, 3 * context.rounds, context.say)
    yield from figures(taken, count)


def asking(child: Child, name: str) -> Callable[[], float]:
    """A side that is a command of a child."""
    return lambda: float(child.ask(name)["seconds"])


def figures(taken: Mapping[str, list[float]], count: int) -> Iterator[Figure]:
    """What the turns of all sides say."""
    for name, seconds in taken.items():
        nanoseconds = statistics.median(seconds) / count * 1e9
        yield Figure("adam", f"{name}_time", nanoseconds, "ns/parameter")
        yield Figure("adam", f"{name}_bytes", BYTES_OF[name], "bytes/parameter")
    for peer, target in {"deepspeed": TARGET_OVER_DEEPSPEED, "torch": None}.items():
        ratio = median_ratio(taken[peer], taken["strata"])
        yield Figure("adam", f"speed_over_{peer}", ratio, "ratio", target, better="higher")
    rates = {name: [1 / each for each in taken[name]] for name in ("strata", "loop")}
    percent = share_of_best(rates["strata"], rates["loop"])
    yield Figure("adam", "of_loop", percent, "%", TARGET_OF_LOOP, bound=100.0, better="higher")
