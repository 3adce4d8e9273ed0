"""A double of torch.cuda: streams, events and memory that follow a script.

It exists to catch device memory that is used on no stream or on the wrong one, times that are read
from the wrong clock, budgets that are asked of the wrong memory, and whoever waits for all of the
device.
"""

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


def wait_for_everything(device: Any = None) -> None:
    """In the place of torch.cuda.synchronize()."""
    raise AssertionError("the device as a whole is never waited for")


class FakeCuda:
    """What was asked of torch.cuda, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = SimpleNamespace(cuda_stream=7)  # the current one
        self.time = 0.0  # of the device, in seconds
        self.allocated = 0
        self.peak = 0
        self.total = 8 << 30
        self.free = 6 << 30
        self.fractions: list[float] = []
        self.capturing = False  # the current stream
        self.asked: list[str] = []  # what may wait for the device, or is slow
        fake = self

        def noted(name: str, answer: Any = None) -> Any:
            """The answer, behind a note that it was asked for."""

            def ask(*args: Any) -> Any:
                self.asked.append(name)
                return answer(*args) if answer else None

            return ask

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                assert stream is fake.stream
                self.at = fake.time

            def synchronize(self) -> None:
                fake.asked.append("event.synchronize")

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) * 1e3

        def stats(device: Any) -> dict[str, int]:
            return {
                "allocated_bytes.all.current": self.allocated,
                "allocated_bytes.all.peak": self.peak,
            }

        def begin_anew(device: Any) -> None:
            self.peak = self.allocated

        class Chosen:
            def __init__(self, device: Any) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: Any) -> None:
                pass

        answers = {
            "Stream": type("Stream", (Stream,), {"synchronize": noted("stream.synchronize")}),
            "Event": Event,
            "current_stream": lambda device=None: self.stream,
            "is_current_stream_capturing": lambda: self.capturing,
            "memory_stats": noted("memory_stats", stats),
            "reset_peak_memory_stats": begin_anew,
            "mem_get_info": noted("mem_get_info", lambda device=None: (self.free, self.total)),
            "set_per_process_memory_fraction": lambda part, device: self.fractions.append(part),
            "empty_cache": noted("empty_cache"),
            "is_available": lambda: True,
            "synchronize": wait_for_everything,
            "device": Chosen,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

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
