"""Bytes that PyTorch holds over time, as steps between moments that somebody noted.

    curve.note(now)                      # at every moment that will be asked for
    curve.stop()
    curve.peak(begin, end)               # bytes, between two of these moments

Times are readings of perf_counter(). Use from one thread at a time.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from time import perf_counter


class Curve(ABC):
    """What is known of PyTorch's memory, on whichever device."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._bytes: list[int] = []
        self._peaks: list[int] = []  # since the moment before

    @abstractmethod
    def _look(self) -> tuple[int, int]:
        """Bytes in use, and the most that there were since the last look."""

    def note(self, time: float) -> None:
        """A moment. REQUIRES: it is now, and behind all that were noted."""
        held, peak = self._look()
        self._times.append(time)
        self._bytes.append(held)
        self._peaks.append(peak)

    def stop(self) -> None:
        """Ends recording."""
        self.note(perf_counter())

    @property
    def held(self) -> int:
        """Bytes in use at the last moment."""
        return self._bytes[-1]

    def at(self, time: float) -> int:
        """Bytes in use at a moment."""
        return self._bytes[self._last(time)]

    def peak(self, begin: float, end: float) -> int:
        """The most bytes in use from one moment to another."""
        first, last = self._last(begin), self._last(end)
        return max(self._bytes[first], *self._peaks[first + 1 : last + 1], 0)

    def _last(self, time: float) -> int:
        return max(0, bisect.bisect_right(self._times, time) - 1)
