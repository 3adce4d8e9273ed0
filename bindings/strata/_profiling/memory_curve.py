"""How much memory PyTorch holds in a step; on the host by what its profiler says of allocations.

    curve = MemoryCurve.start()          # None: somebody else profiles already
    curve.note(now)                      # at every moment that will be asked for
    curve.stop()
    curve.peak(begin, end)               # bytes, between two of these moments

Only what was allocated since start() counts, by the thread that started it and autograd on its
behalf: pages, parameters and the batch are not PyTorch's to give back.

Note [Pinned heap]. The profiler notes each allocation in small blocks that it keeps. Where such a
block comes to lie in the hole that a freed tensor left, the next tensor of that size takes new
memory, and a step can come to hold many times of what it uses. So its notes are taken away at every
moment, before there are many.

Note [Older blocks]. When a tensor is freed that is older than the recording, PyTorch's allocator
logs a warning to stderr: the first time, and every thousandth. Such tensors are expected here (the
batch and the loss of the step before), so warnings of PyTorch's C++ log are off while a curve
records. What torch warns of in Python takes another way, and is heard.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from time import perf_counter
from typing import ClassVar

import torch
from torch.autograd import ProfilerConfig, ProfilerState

from .._torch_compat import (
    LIBRARY,
    PROFILER_LEGACY,
    ProfilerDetails,
    ProfilerEnd,
    disable_profiler,
    enable_profiler,
    profiler_enabled,
    profiler_type,
)
from .cuda_memory import CudaMemoryCurve, counts_memory
from .curve import Curve

ALLOCATION = "memory_alloc"
LOG_ERRORS = 2  # and nothing below; c10/util/Logging.h
_goes_on = ProfilerEnd(
    False,  # do not end the profiler
    True,  # take what it has noted
)


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
    return [change.cpu_memory_usage() for change in changes]


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
