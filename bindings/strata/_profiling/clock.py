"""When something happened, as the device sees it.

    clock = make_clock(torch.device("cuda", 0))
    then = clock.now()                  # seconds of perf_counter()
    ...
    device_times = clock.take()      # {then: when the device came to it}; {}: it was right then

On the host a reading says all. On a GPU Python launches kernels and goes on, so what passes between
two readings is only how long launching took: each reading leaves an event on the current stream as
well, and the events are read together, at the end of the step. By then the gradients have left the
device, so that there is next to nothing to wait for, and the device as a whole is never waited for.

Threads: any thread may read; take() when nothing else is under way.
"""

from __future__ import annotations

from time import perf_counter

import torch

EVENTS_MAX = 1 << 16  # of a step; forwards without end that no step() follows keep no more


class HostClock:
    """perf_counter()."""

    def now(self) -> float:
        """A reading."""
        return perf_counter()

    def take(self) -> dict[float, float]:
        """Forgets the readings. Returns when the device came to each, where that is not the same;
        both on the scale of perf_counter()."""
        return {}


class DeviceClock:
    """perf_counter(), with an event of the GPU beside each reading."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[float, torch.cuda.Event]] = []
        self._last: dict[int, torch.cuda.Event] = {}  # of each stream, by cudaStream_t
        self._free: list[torch.cuda.Event] = []

    def now(self) -> float:
        """A reading. Where there were too many of them the device's times are not told."""
        if len(self._marks) >= EVENTS_MAX:
            return perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        event.record(stream)
        time = perf_counter()
        self._marks.append((time, event))
        self._last[stream.cuda_stream] = event
        return time

    def take(self) -> dict[float, float]:
        """Waits until the device has come to the last reading on each stream that was used."""
        marks, self._marks = self._marks, []
        others, self._last = self._last.values(), {}
        self._free += [event for _, event in marks]
        if not marks or len(marks) >= EVENTS_MAX:
            return {}
        last = marks[-1][1]
        last.synchronize()
        # The stream had nothing else to do, so the device came to the last one just now.
        end = perf_counter()
        for event in others:  # nothing may have made the last one's stream wait for them
            if event is not last:
                event.synchronize()
        return {time: end - event.elapsed_time(last) * 1e-3 for time, event in marks}


def make_clock(device: torch.device) -> HostClock | DeviceClock:
    """The clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
