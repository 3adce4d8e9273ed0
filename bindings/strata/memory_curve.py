"""How much memory PyTorch holds over time, from the allocations that its profiler reports.

    curve = MemoryCurve.start()          # None: somebody else profiles already
    ...
    curve.stop()
    curve.peak(begin, end)               # bytes, between two readings of perf_counter()

Only what was allocated since start() counts, by the thread that started it and autograd on its
behalf: pages, parameters and the batch are not PyTorch's to give back.
"""

from __future__ import annotations

import bisect
from time import perf_counter

import torch
from torch.autograd import ProfilerConfig, ProfilerState

ALLOCATION = "memory_alloc"


class MemoryCurve:
    """Bytes in use, as steps in time."""

    def __init__(self) -> None:
        self._begin = perf_counter()
        self._times: list[float] = [self._begin]
        self._bytes: list[int] = [0]

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
        # The profiler without Kineto: it reports allocations too, and prints nothing.
        torch.autograd._enable_profiler_legacy(config)
        return cls()

    def stop(self) -> None:
        """Ends recording; from here on at() and peak() answer."""
        lists = torch.autograd._disable_profiler_legacy()
        events = [event for events in lists for event in events]
        if not events:
            return
        first = events[0]
        changes = sorted(
            (first.cpu_elapsed_us(event) * 1e-6, event.cpu_memory_usage())
            for event in events
            if event.kind() == ALLOCATION
        )
        held = 0
        for seconds, change in changes:
            held += change
            self._times.append(self._begin + seconds)
            self._bytes.append(held)

    def at(self, time: float) -> int:
        """Bytes in use; never negative, for what is freed may be older than the recording."""
        return max(0, self._bytes[bisect.bisect_right(self._times, time) - 1])

    def peak(self, begin: float, end: float) -> int:
        """The most bytes in use from `begin` to `end`."""
        first = max(0, bisect.bisect_right(self._times, begin) - 1)
        last = max(first + 1, bisect.bisect_right(self._times, end))
        return max(0, *self._bytes[first:last])
