"""A double of torch.cuda: streams, events and memory that follow a script.

It exists to catch device memory that is used on no stream or on the wrong one, times that are read
from the wrong clock or from events that a stream has not come to, budgets that are asked of the
wrong memory, limits of the user's that are lost, and whoever waits for all of the device.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Stream:
    """A stream that remembers which others it waits for."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.cuda_stream = 1000 + Stream.made
        self.waits: list[int] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other.cuda_stream)

    def wait_event(self, event: Any) -> None:
        self.waits.append(event.of)


def wait_for_everything(device: Any = None) -> None:
    """In the place of torch.cuda.synchronize()."""
    raise AssertionError("the device as a whole is never waited for")


class Event:
    """An event that nobody may look at before its stream has come to it."""

    cuda: "FakeCuda"  # of the class that a test uses

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed = enable_timing

    def record(self, stream: Any) -> None:
        assert stream is self.cuda.stream
        self.of = stream.cuda_stream
        if not self.timed:
            return
        self.at = self.cuda.time
        self.ahead = self.cuda.coming.setdefault(stream.cuda_stream, [])
        self.ahead.append(self)

    def synchronize(self) -> None:
        self.cuda.asked.append("event.synchronize")
        if self in self.ahead:
            del self.ahead[: self.ahead.index(self) + 1]

    def elapsed_time(self, other: Any) -> float:
        assert self.timed
        assert other.timed
        if self in self.ahead or other in other.ahead:
            raise RuntimeError("CUDA error: device not ready")
        return float(other.at - self.at) * 1e3


class FakeCuda:
    """What was asked of torch.cuda, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = SimpleNamespace(cuda_stream=7)  # the current one
        self.coming: dict[int, list[Event]] = {}  # what each stream has yet to come to, in order
        self.time = 0.0  # of the device, in seconds
        self.allocated = 0
        self.peak = 0
        self.total = 8 << 30
        self.free = 6 << 30
        self.reserve = 0  # bytes that torch's allocator keeps for itself
        self.initialized = True
        self.fractions: list[float] = []
        self.backend = "native"
        self.capturing = False  # the current stream
        self.asked: list[str] = []  # what may wait for the device, or is slow
        synchronize = self._noted("stream.synchronize")
        answers = {
            "Stream": type("Stream", (Stream,), {"synchronize": synchronize}),
            "Event": type("Event", (Event,), {"cuda": self}),
            "current_stream": lambda device=None: self.stream,
            "is_current_stream_capturing": lambda: self.capturing,
            "memory_stats": self._noted("memory_stats", self._stats),
            "reset_peak_memory_stats": self._begin_anew,
            "mem_get_info": self._noted("mem_get_info", self._memory),
            "set_per_process_memory_fraction": lambda part, device: self.fractions.append(part),
            "get_per_process_memory_fraction": self._fraction,
            "get_allocator_backend": lambda: self.backend,
            "empty_cache": self._noted("empty_cache", self._give_reserve_back),
            "is_available": lambda: True,
            "synchronize": wait_for_everything,
            "is_initialized": lambda: self.initialized,
            "current_device": lambda: 0,
            "device": lambda device: nullcontext(),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def _noted(self, name: str, answer: Any = None) -> Any:
        """The answer, behind a note that it was asked for."""

        def ask(*args: Any) -> Any:
            self.asked.append(name)
            return answer(*args) if answer else None

        return ask

    def _stats(self, device: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
        }

    def _memory(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.total

    def _begin_anew(self, device: Any) -> None:
        self.peak = self.allocated

    def _give_reserve_back(self) -> None:
        self.free += self.reserve
        self.reserve = 0

    def _fraction(self, device: Any) -> float:
        if self.backend == "pluggable":
            raise RuntimeError("CUDAPluggableAllocator does not yet support getMemoryFraction")
        return self.fractions[-1] if self.fractions else 1.0

    def take(self, byte_count: int) -> None:
        """An allocation; a negative one gives back."""
        self.allocated += byte_count
        self.peak = max(self.peak, self.allocated)


class MetaGpu(TorchFunctionMode):
    """The meta device stands for a GPU's memory: whoever computes on it with a tensor that was
    left on the host is told so. `made` counts what was made there, or moved."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def there(value: Any) -> Any:
            if not (isinstance(value, torch.device) and value.type == "cuda"):
                return value
            self.made += 1
            return torch.device("meta")

        more = {name: there(value) for name, value in (kwargs or {}).items()}
        return function(*map(there, args), **more)
