"""Where a step holds up the processor until the GPU is done: the driver's synchronising calls, as
torch.profiler sees them, its own left out.

    counts = synchronisations(side.step)         # {"device": 0, "stream": 1, "event": 3}

The profiler sees calls of every thread of the process, those of strata's library too.
"""

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

RANGE = "strata: the step that is traced"
# What waits for all work of a device, of a stream, or until an event has passed. Who frees memory
# waits for the device as well, and a copy that is not asynchronous for its stream.
KINDS = {
    "device": re.compile(r"cu(da)?(Device|Ctx)Synchronize|cu(da)?(Mem)?Free(Host)?(_v2)?"),
    "stream": re.compile(r"cu(da)?StreamSynchronize(_ptsz)?|cudaMemcpy|cuMemcpy[HD]to[HD](_v2)?"),
    "event": re.compile(r"cu(da)?EventSynchronize"),
}


class _Span(Protocol):
    start: float
    end: float


class Event(Protocol):
    """Of torch.profiler, as far as it is looked at."""

    name: str
    time_range: _Span


def synchronisations(step: Callable[[], object]) -> dict[str, int]:
    """How often calls of each kind are made in a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        torch.profiler.profile(activities=activities) as trace,
        torch.profiler.record_function(RANGE),
    ):
        step()
    return count(trace.events())


def count(events: Iterable[Event]) -> dict[str, int]:
    """Of those that begin within the range, on any thread."""
    events = list(events)
    spans = [event.time_range for event in events if event.name == RANGE]
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    counts = dict.fromkeys(KINDS, 0)
    for event in events:
        for kind, names in KINDS.items():
            if names.fullmatch(event.name) and begin <= event.time_range.start <= end:
                counts[kind] += 1
    return counts
