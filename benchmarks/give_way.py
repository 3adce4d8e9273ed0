"""Computation that shares its cores with a worker of the optimizer, under each way to step back.

The computation is a chain of matrix products and element-wise operations on all cores, with a
barrier after each. Beside what it loses stands what the worker's bytes explain: the time that the
memory of this machine needs to move them for all cores together.
"""

import os
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from .common import BenchError, Context, Figure

BYTES_PER_ELEMENT = 26  # bfloat16 AdamW: four streams read and written, the gradient read
WIDTH = 1024
ROWS = 256
CHUNK_BYTES = 1 << 20


def _nice(step: int) -> Callable[[int], None]:
    return lambda thread: os.setpriority(os.PRIO_PROCESS, thread, step)


def _scheduler(policy: int) -> Callable[[int], None]:
    return lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(0))


WAYS: dict[str, Callable[[int], None]] = {
    "none": lambda thread: None,
    "nice3": _nice(3),
    "nice5": _nice(5),
    "nice7": _nice(7),
    "nice10": _nice(10),
    "nice19": _nice(19),
    "batch": _scheduler(os.SCHED_BATCH),
    "idle": _scheduler(os.SCHED_IDLE),
}


def workers_of_this_process() -> list[int]:
    """The ids of the optimizer's threads."""
    return [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("strata-opt")
    ]


class Computation:
    """Rounds of a chain that uses all of torch's threads."""

    def __init__(self) -> None:
        self.weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4)]
        self.rows = torch.randn(ROWS, WIDTH)

    def run(self, seconds: float) -> float:
        """Seconds of a round."""
        rounds, begin = 0, perf_counter()
        while perf_counter() < begin + seconds:
            values = self.rows
            for weight in self.weights:
                values = torch.nn.functional.gelu(values @ weight)
            rounds += 1
        return (perf_counter() - begin) / rounds


def beside(computation: Computation, way: str, seconds: float) -> tuple[float, float]:
    """Seconds of a round, and bytes per second of a worker that always has something to do."""
    from strata._core import UpdateProbe

    probe = UpdateProbe(1, "bfloat16", CHUNK_BYTES, 256 << 20)
    threads = workers_of_this_process()
    if len(threads) != 1:
        raise BenchError(f"one worker expected, not {len(threads)}")
    probe.run(0.2)  # touches every page
    WAYS[way](threads[0])
    elements = 0.0

    def work() -> None:
        nonlocal elements
        elements = probe.run(seconds)

    worker = threading.Thread(target=work)
    worker.start()
    each = computation.run(seconds)
    worker.join()
    return each, elements * BYTES_PER_ELEMENT


def run(context: Context) -> Iterator[Figure]:
    """Yields, by way, what the computation loses beside what the worker's bytes explain (the
    bound), and how fast the worker was."""
    from strata._core import UpdateProbe

    seconds = 0.2 if context.quick else 2.0
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    probe = UpdateProbe(cores, "bfloat16", CHUNK_BYTES, 256 << 20)
    probe.run(0.2)
    bandwidth = statistics.median(probe.run(seconds) for _ in range(3)) * BYTES_PER_ELEMENT
    del probe
    yield Figure("give-way", "bandwidth", bandwidth / 1e9, "GB/s", better="higher")
    computation = Computation()
    computation.run(seconds)
    lost: dict[str, list[float]] = {way: [] for way in WAYS}
    moved: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(context.rounds):
        for way in WAYS:
            context.say(f"turn {turn + 1}, {way}")
            alone = computation.run(seconds)
            each, rate = beside(computation, way, seconds)
            lost[way].append(each / alone - 1)
            moved[way].append(rate)
    for way in WAYS:
        rate = statistics.median(moved[way])
        loss = statistics.median(lost[way])
        # Of the time alone: a round that takes 1 + loss sees that much of the worker's bytes.
        explained = rate / bandwidth * (1 + loss)
        yield Figure("give-way", f"{way}_slowdown", 100 * loss, "%", bound=100 * explained)
        yield Figure("give-way", f"{way}_worker", rate / 1e9, "GB/s", better="higher")
