"""PyTorch's memory on a GPU: how much it held over time, and how much it may hold.

    curve = CudaMemoryCurve(device)
    curve.note(now)                      # at every moment that will be asked for
    curve.stop()
    curve.peak(begin, end)               # bytes, between two of these moments

    allocator = Allocator(device, 8 << 30)
    allocator.give_pages(5 << 30)        # more than 3 GiB of tensors raise torch's own error

Use from one thread at a time.

Note [What counts]. All that torch's allocator has given out, batch and buffers included: unlike on
the host, nothing else of the process lies in the device's budget, but for the pages, which it does
not know. What it keeps in reserve counts for the limit: where that would be passed, it gives the
reserve back first.

Note [Peaks]. The allocator tells the highest use since it was asked to begin anew, which note()
does each time. So in a step that is measured, what torch.cuda.max_memory_allocated() tells the user
is the peak of a part of it.
"""

from __future__ import annotations

import bisect
from time import perf_counter

import torch


class CudaMemoryCurve:
    """Bytes in use, as steps between the moments that were noted."""

    def __init__(self, device: torch.device) -> None:
        """Begins to record. REQUIRES: CUDA is initialised, as it is where a tensor was made."""
        self._device = device
        self._times: list[float] = []
        self._bytes: list[int] = []
        self._peaks: list[int] = []  # since the moment before
        self.note(perf_counter())

    def note(self, time: float) -> None:
        """A moment. REQUIRES: it is now, and behind all that were noted."""
        stats = torch.cuda.memory_stats(self._device)
        self._times.append(time)
        self._bytes.append(stats["allocated_bytes.all.current"])
        self._peaks.append(stats["allocated_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """Ends recording."""
        self.note(perf_counter())

    def at(self, time: float) -> int:
        """Bytes in use at a moment."""
        return self._bytes[self._last(time)]

    def peak(self, begin: float, end: float) -> int:
        """The most bytes in use from one moment to another."""
        first, last = self._last(begin), self._last(end)
        return max(self._bytes[first], *self._peaks[first + 1 : last + 1], 0)

    def _last(self, time: float) -> int:
        return max(0, bisect.bisect_right(self._times, time) - 1)


class Allocator:
    """PyTorch's allocator, which may have what pages leave of a device budget. On the host nothing
    is to be done: it has no limit there. A limit that the user had set is kept to, and put back.
    """

    def __init__(self, device: torch.device, device_bytes: int) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self.page_bytes = 0
        self._usual: float | None = None  # what of the device the user let PyTorch have

    def give_pages(self, page_bytes: int) -> None:
        """Pages take so much of the budget. What PyTorch has in reserve is given back."""
        if page_bytes != self.page_bytes and self._device.type == "cuda":
            if self._usual is None:
                self._usual = memory_fraction(self._device)
            rest = max(0, self._device_bytes - page_bytes)
            total = torch.cuda.mem_get_info(self._device)[1]
            torch.cuda.set_per_process_memory_fraction(min(self._usual, rest / total), self._device)
            with torch.cuda.device(self._device):
                torch.cuda.empty_cache()
        self.page_bytes = page_bytes

    def close(self) -> None:
        """PyTorch may hold what it could before."""
        if self._usual is not None:
            torch.cuda.set_per_process_memory_fraction(self._usual, self._device)
            self._usual = None


def counts_memory() -> bool:
    """Whether PyTorch's allocator says how much it has given out: one of the user's does not."""
    return torch.cuda.get_allocator_backend() != "pluggable"


def memory_fraction(device: torch.device) -> float:
    """The part of a device that PyTorch may have."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # older PyTorches do not say
    return float(ask(device)) if ask is not None and counts_memory() else 1.0
