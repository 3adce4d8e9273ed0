"""How much memory PyTorch holds over time, from the allocations that its profiler reports.

    curve = MemoryCurve.start()          # None: somebody else profiles already
    ...
    curve.stop()
    curve.peak(begin, end)               # bytes, between two readings of perf_counter()

Only what was allocated since start() counts, by the thread that started it and autograd on its
behalf: pages, parameters and the batch are not PyTorch's to give back.

Note [Two clocks]. The profiler counts microseconds from its own beginning. A few allocations at
start(), of which perf_counter() tells when they happened, tie its clock to ours.

Note [Pinned heap]. The profiler notes each allocation in a small block that it keeps. Where such a
block comes to lie in the hole that a freed tensor left, the next tensor of that size takes new
memory, and a step can come to hold many times of what it uses. So glibc is told to take tensors
from the system while the profiler runs, and to give back the rest of the heap behind it. Other
allocators do not listen, and keep small blocks apart on their own.
"""

from __future__ import annotations

import bisect
import ctypes
from time import perf_counter
from typing import Protocol

import torch
from torch.autograd import ProfilerConfig, ProfilerState

from .cuda_memory import CudaMemoryCurve, counts_memory

ALLOCATION = "memory_alloc"
TIES = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_MIN = 256 << 10  # bytes of a tensor that may leave no hole while the profiler runs
MAPPED_MIN_USUAL = 32 << 20  # where glibc's own, growing threshold ends


class Curve(Protocol):
    """What is known of PyTorch's memory, on whichever device."""

    def note(self, time: float) -> None:
        """A time at which at() and peak() will be asked, now. On the host any will do."""

    def stop(self) -> None:
        """Ends recording; from here on at() and peak() answer."""

    def at(self, time: float) -> int:
        """Bytes in use."""

    def peak(self, begin: float, end: float) -> int:
        """The most bytes in use from `begin` to `end`."""


def start_curve(device: torch.device) -> Curve | None:
    """Begins to record what PyTorch holds on a device; None where that cannot be done now."""
    if device.type == "cuda":
        return CudaMemoryCurve(device) if counts_memory() else None
    return MemoryCurve.start()


class MemoryCurve:
    """Bytes in use, as steps in time."""

    def __init__(self) -> None:
        # 1. Ties, see Note [Two clocks]: the one that took least time tells most.
        ties = [self._tie() for _ in range(TIES)]
        shortest = min(ties)
        self._tie_index, self._tie_time = ties.index(shortest), shortest[1]
        # 2. What stop() fills in.
        self._times: list[float] = [self._tie_time]
        self._bytes: list[int] = [0]

    @staticmethod
    def _tie() -> tuple[float, float]:
        """Allocates and frees a few bytes. How long that took, and when it was."""
        before = perf_counter()
        torch.empty(1, device="cpu")
        after = perf_counter()
        return after - before, (before + after) / 2

    @classmethod
    def start(cls) -> MemoryCurve | None:
        """Begins to record; None where a profiler is running already."""
        if torch._C._autograd._profiler_enabled():
            return None
        config = ProfilerConfig(
            ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            False,  # stacks
            False,  # flops
            False,  # modules
            torch._C._profiler._ExperimentalConfig(),
        )
        _keep_heap_whole(MAPPED_MIN)
        # The profiler without Kineto: it reports allocations too, and prints nothing.
        torch.autograd._enable_profiler_legacy(config)
        return cls()

    def note(self, time: float) -> None:
        """The profiler sees every moment."""

    def stop(self) -> None:
        """Ends recording; from here on at() and peak() answer."""
        changes = self._changes()
        _keep_heap_whole(MAPPED_MIN_USUAL)
        changes.sort(key=lambda change: change[0])  # several threads; the order of each stays
        tie = 2 * self._tie_index  # each was allocated and freed
        if len(changes) <= tie:
            return
        shift = self._tie_time - changes[tie][0]
        held = 0
        for seconds, change in changes[2 * TIES :]:
            held += change
            self._times.append(seconds + shift)
            self._bytes.append(held)

    @staticmethod
    def _changes() -> list[tuple[float, int]]:
        """Ends the profiler. What it saw: seconds on its own clock, and bytes taken or freed."""
        lists = torch.autograd._disable_profiler_legacy()
        events = [event for events in lists for event in events]
        return [
            (events[0].cpu_elapsed_us(event) * 1e-6, event.cpu_memory_usage())
            for event in events
            if event.kind() == ALLOCATION
        ]

    def at(self, time: float) -> int:
        """Bytes in use; never negative, for what is freed may be older than the recording."""
        return max(0, self._bytes[bisect.bisect_right(self._times, time) - 1])

    def peak(self, begin: float, end: float) -> int:
        """The most bytes in use from `begin` to `end`."""
        first = max(0, bisect.bisect_right(self._times, begin) - 1)
        last = max(first + 1, bisect.bisect_right(self._times, end))
        return max(0, *self._bytes[first:last])


def _keep_heap_whole(mapped_min: int) -> None:
    """See Note [Pinned heap]. Blocks of `mapped_min` bytes and more get a mapping of their own."""
    libc = ctypes.CDLL(None)
    try:
        libc.mallopt(M_MMAP_THRESHOLD, mapped_min)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * mapped_min)
        libc.malloc_trim(0)
    except AttributeError:  # not glibc
        return
