"""How much memory PyTorch holds in a step: on the host by what its profiler says of allocations, on
a GPU by its allocator.

    curve = start_curve(device)          # None: that cannot be done now
    curve.note(now)                      # at every moment that will be asked for
    curve.stop()
    curve.peak(begin, end)               # bytes, between two of these moments

Times are readings of perf_counter(). Use from one thread at a time. On the host only what was
allocated since start() counts, by the thread that started it and autograd on its behalf: pages,
parameters and the batch are not PyTorch's to give back.

Note [Pinned heap]. The profiler notes each allocation in small blocks that it keeps. Where such a
block comes to lie in the hole that a freed tensor left, the next tensor of that size takes new
memory, and a step can come to hold many times of what it uses. So its notes are taken away at every
moment, before there are many.

Note [Older blocks]. When a tensor is freed that is older than the recording, PyTorch's allocator
logs a warning to stderr: the first time, and every thousandth. Such tensors are expected here (the
batch and the loss of the step before), so warnings of PyTorch's C++ log are off while a curve
records. What torch warns of in Python takes another way, and is heard.

Note [States of generators]. Each torch.utils.checkpoint keeps the state of the CPU's generator:
5 KB in host memory, whatever the device. On the host these would count as the device's, and a layer
behind a thousand checkpoints would not fit. So allocations of exactly that size are left out.

Note [Left callbacks]. The profiler sees operations by a callback of the thread. Where its notes are
taken before its end, it forgets that the callback is its own and leaves it there: each recording
would make every later operation slower, and note it once more in the next one. So all callbacks of
the thread go with the recording, where there were none before.

Note [Peaks]. The allocator tells the highest use since its peak was last reset, and note() resets
it each time. So in a step that is measured, torch.cuda.max_memory_allocated() tells the user the
peak of a part of it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import ClassVar

import torch
from torch.autograd import ProfilerConfig, ProfilerState

from .._torch_compat import (
    CLEAR_CALLBACKS,
    HAS_CALLBACKS,
    LIBRARY,
    PROFILER_LEGACY,
    ProfilerDetails,
    ProfilerEnd,
    disable_profiler,
    enable_profiler,
    profiler_enabled,
    profiler_type,
)


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


ALLOCATION = "memory_alloc"
LOG_ERRORS = 2  # and nothing below; c10/util/Logging.h
_goes_on = ProfilerEnd(
    False,  # do not end the profiler
    True,  # take what it has noted
)


def counts_memory() -> bool:
    """Whether PyTorch's allocator counts what it has given out. One that the user plugged in does
    not."""
    return torch.cuda.get_allocator_backend() != "pluggable"


def start_curve(device: torch.device) -> Curve | None:
    """Begins to record what PyTorch holds on a device; None where that cannot be done now."""
    if device.type == "cuda":
        return CudaMemoryCurve(device) if counts_memory() else None
    return MemoryCurve.start()


class MemoryCurve(Curve):
    """PyTorch's memory on the host."""

    def __init__(self) -> None:
        """See start()."""
        super().__init__()
        self._held = 0
        self._stopped = False

    @classmethod
    def start(cls) -> MemoryCurve | None:
        """Begins to record; None where a profiler is running already."""
        if profiler_enabled():
            return None
        config = ProfilerConfig(
            ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            False,  # stacks
            False,  # flops
            False,  # modules
            ProfilerDetails(),
        )
        # Garbage of the step before would be freed in this one, and seem to be room there. What is
        # older is left alone: to look through all objects takes a good part of a second.
        gc.collect(1)
        _CppLog.hush()
        _callbacks.begin()
        # The profiler without Kineto: it reports allocations too, and prints nothing.
        enable_profiler(config)
        curve = cls()
        curve.note(perf_counter())
        return curve

    def stop(self) -> None:
        """Ends recording. Idempotent. On another thread than start() it only loses what comes."""
        if self._stopped:
            return
        self._stopped = True
        super().stop()
        if profiler_type() == PROFILER_LEGACY:
            disable_profiler()
            _callbacks.end()
        _CppLog.speak()

    def _look(self) -> tuple[int, int]:
        peak = self._held
        for change in _changes():
            self._held += change
            peak = max(peak, self._held)
        # Never negative: what is freed may be older than the recording.
        return max(0, self._held), max(0, peak)


def _changes() -> list[int]:
    """Bytes that were taken or freed since this was asked last, in order."""
    if profiler_type() != PROFILER_LEGACY:  # autograd's own threads, or a profiler of the user's
        return []
    events = [e for events in disable_profiler(_goes_on) for e in events]
    changes = [e for e in events if e.kind() == ALLOCATION]
    if len(changes) > 1:  # of several threads; the order of each stays
        first = events[0]
        changes.sort(key=first.cpu_elapsed_us)
    sizes = [change.cpu_memory_usage() for change in changes]
    state = _state_bytes()
    return [size for size in sizes if abs(size) != state]


@functools.cache
def _state_bytes() -> int:
    """See Note [States of generators]."""
    return torch.default_generator.get_state().nbytes


@functools.cache
def _callback_functions() -> tuple[Callable[[], bool], Callable[[], None]]:
    """Of the thread that calls them: whether it has callbacks, and their end."""
    library = ctypes.CDLL(LIBRARY)
    try:
        has, clear = library[HAS_CALLBACKS], library[CLEAR_CALLBACKS]
    except AttributeError:
        return lambda: True, lambda: None
    has.restype, clear.restype = ctypes.c_bool, None
    return has, clear


class _Callbacks(threading.local):
    """Of a thread. See Note [Left callbacks]."""

    _ours = False  # all that there are, and those of a curve that was stopped on another thread

    def begin(self) -> None:
        """A curve begins."""
        self.end()
        has, _ = _callback_functions()
        self._ours = not has()

    def end(self) -> None:
        """It ends."""
        _, clear = _callback_functions()
        if self._ours:
            clear()
        self._ours = False


_callbacks = _Callbacks()


class _CppLog:
    """The level of PyTorch's C++ log, which is one for the process. See Note [Older blocks]."""

    _lock = threading.Lock()
    _hushed = 0  # curves that record
    _usual = 0  # the level that was found
    _level: ClassVar[ctypes.c_int | None] = None

    @classmethod
    def hush(cls) -> None:
        """A curve begins."""
        with cls._lock:
            if cls._hushed == 0:
                # A PyTorch that is built with another log does not have it.
                with contextlib.suppress(OSError, ValueError):
                    library = ctypes.CDLL(LIBRARY)
                    cls._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
                if cls._level is not None:
                    cls._usual = cls._level.value
                    cls._level.value = max(cls._usual, LOG_ERRORS)
            cls._hushed += 1

    @classmethod
    def speak(cls) -> None:
        """It ends."""
        with cls._lock:
            cls._hushed -= 1
            if cls._hushed == 0 and cls._level is not None:
                cls._level.value = cls._usual


class CudaMemoryCurve(Curve):
    """Bytes in use, as PyTorch's allocator counts them."""

    def __init__(self, device: torch.device) -> None:
        """Begins to record. REQUIRES: CUDA is initialised, as it is where a tensor was made."""
        super().__init__()
        self._device = device
        self.note(perf_counter())

    def _look(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
