"""Records a step as the planner wants it: uses of units with their times, and on request the
tensors that autograd saves, by storage, and the memory that PyTorch takes.

    recorder.begin()                # from here on in detail
    recorder.note_batch(elements)   # before every forward of the model
    ...                             # hooks call enter, leave, paused, inputs, saved and used
    step = recorder.take()          # at the end of every step
    recorder.close()                # when there will be no end

Times are always noted, which costs about a microsecond; `recording` is true while saved tensors and
memory are too. Use from the thread that trains; autograd's threads call it under the GIL.

Note [Rounds]. Where several forwards and backwards make one step, each pair is a round. take()
returns the last round of the largest batch. Rounds of as large batches are alike, the first one
still warms up, and the plan for the largest batch serves the others.

Note [No backward]. A recording that waits for a backward keeps PyTorch's profiler, of which a
thread has one: the user could start none. So it ends with the last graph of the step of which
nobody has gone backward. The nodes of its outputs tell that by a token, which dies with them.
Limit: where such a graph is kept, so is the profiler.

Note [Two times]. Uses are put together as they happen, because saved tensors refer to them. On a
GPU their times are not known yet. So each call is noted, and all are replayed with the device's
times when the step is over.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._core import SavedTensor
from .clock import HostClock, make_clock
from .memory_curve import Curve, start_curve
from .uses import RecordedStep, Uses

NOT_RECORDED = -1

log = logging.getLogger("strata")


_Call = tuple[Any, tuple[Any, ...], tuple[float, ...]]  # of a method of Uses; its times


class _Graph:
    """Lives as long as a graph does."""


def _end_unused(recorder: weakref.ref[Recorder]) -> None:
    if (found := recorder()) is not None:
        found._end_unused()


class Recorder:
    """What happened since the last take()."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: what computes; default: the host."""
        self.recording = False
        self._device = device or torch.device("cpu")
        self._clock = make_clock(self._device)
        self._replays = not isinstance(self._clock, HostClock)
        self._curve: Curve | None = None
        self._depth: dict[int, int] = {}  # by unit: enters without their leave
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._clear()

    def _clear(self) -> None:
        """The next step begins."""
        self._rounds = 0  # that are over
        self._batch = 0  # elements, of the largest batch
        self._counts = True  # the round that is next
        self._largest: tuple[RecordedStep, list[_Call]] | None = None  # smaller ones followed
        self._ignored: list[tuple[float, float]] = []
        self._begin_round()

    def _begin_round(self) -> None:
        self._uses = Uses()
        self._happened: list[_Call] = []
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._inputs: dict[int, StorageWeakRef] = {}

    @property
    def in_step(self) -> bool:
        """Whether anything was used since the last take()."""
        return bool(self._uses.step.uses)

    def begin(self) -> None:
        """Records the step that begins in detail. It costs some tens of microseconds a tensor."""
        if self.recording:
            return
        self._clear()
        self.recording = True
        self.measure()
        if self._curve is None:
            log.info(
                "PyTorch's own memory is not measured in this step: a profiler is running, or an "
                "allocator that does not tell"
            )

    def measure(self) -> None:
        """Measures, in the step that begins, the most memory that PyTorch holds."""
        if self._curve is None:
            self._curve = start_curve(self._device)

    @property
    def measuring(self) -> bool:
        """Whether what PyTorch holds is counted now."""
        return self._curve is not None

    def close(self) -> None:
        """Ends a recording in the middle: PyTorch's profiler would go on for ever. Idempotent; on
        the thread that began it."""
        curve, self._curve = self._curve, None
        self.recording = False
        if curve is not None:
            curve.stop()

    def abandon(self) -> None:
        """Forgets the step so far: it was given up."""
        self.close()
        self._depth.clear()
        self._clear()

    def await_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """The model's forward has returned these. See Note [No backward]."""
        nodes: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        if self._curve is None or not nodes:
            return
        graph = _Graph()
        weakref.finalize(graph, _end_unused, weakref.ref(self)).atexit = False
        self._graphs.add(graph)  # behind the finalizer, which is called once it is out of the set
        for node in nodes:
            node.metadata["strata", id(self)] = graph

    def _end_unused(self) -> None:
        """A graph has gone."""
        idle = not self._graphs and not any(self._depth.values())
        if self._curve is not None and idle and not self._uses.step.has_backward:
            self.abandon()

    def note_batch(self, elements: int) -> None:
        """The forward of the whole model is called with so many elements. See Note [Rounds]."""
        self._counts = elements >= self._batch
        self._batch = max(self._batch, elements)

    def land(self) -> None:
        """A gradient is complete."""
        self._uses.step.landed = True

    def now(self) -> float:
        """A time that the other methods take."""
        time = self._clock.now()
        if self._curve is not None:
            self._curve.note(time)
        return time

    def enter(self, unit: int, backward: bool, wait_began: float, recorded: bool) -> None:
        """A unit has been entered; `wait_began`: now() before waiting for it."""
        depth = self._depth.get(unit, 0)
        self._depth[unit] = depth + 1
        if not recorded or depth:
            return
        if self._uses.is_over(backward):
            self._rounds += 1
            if self._counts:
                self._largest = None
            elif self._largest is None:
                self._largest = self._uses.finish(wait_began), self._happened
            self._begin_round()
        self._note(Uses.enter, (unit, backward), (wait_began, self.now()))

    def leave(self, unit: int) -> None:
        """A unit is left."""
        depth = self._depth.get(unit, 0)
        self._depth[unit] = max(0, depth - 1)
        if depth == 1 and self._uses.is_open(unit):
            self._note(Uses.leave, (unit,), (self.now(),))

    def correct(self, unit: int, depth: int) -> None:
        """Leaves the unit until it is entered `depth` times: an exception kept hooks from it."""
        while self._depth.get(unit, 0) > depth:
            self.leave(unit)

    @contextmanager
    def paused(self, part_of_step: bool = True) -> Iterator[None]:
        """A context in which nothing is computed: somebody waits for bytes, or moves them. Where it
        is no `part_of_step`, its memory does not count either."""
        begin = self.now()
        yield
        end = self.now()
        self._note(Uses.pause, (), (begin, end))
        if self.recording and not part_of_step:
            self._ignored.append((begin, end))

    def inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that a unit's forward was called with. Call while `recording`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._inputs[storage._cdata] = StorageWeakRef(storage)

    def saved(self, unit: int, tensor: torch.Tensor) -> int:
        """Autograd saves a tensor in a unit's forward. Returns a number for used(), the same for
        every view of one storage. Call while `recording`, and not for a recomputation."""
        step = self._uses.step
        if not step.uses:
            return NOT_RECORDED
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        given = self._inputs.get(key)
        born = max(i for i, use in enumerate(step.uses) if use.unit == unit)
        step.tensors.append(
            SavedTensor(
                unit=unit,
                bytes=storage.nbytes(),
                born=born,
                last_used=born,
                input=given is not None and not given.expired(),
            )
        )
        number = len(step.tensors) - 1
        self._numbers[key] = (StorageWeakRef(storage), number)
        return number

    def saved_copies(
        self, unit: int, copies: Iterable[torch.Tensor], given: Iterable[torch.Tensor]
    ) -> None:
        """The unit saves copies of inputs in the place of those that it was given, which are not
        counted again. Call while `recording`."""
        for copied, tensor in zip(copies, given, strict=True):
            if copied is tensor:
                continue
            self.inputs((copied,))
            number = self.saved(unit, copied)
            if number != NOT_RECORDED:
                storage = tensor.untyped_storage()
                self._numbers[storage._cdata] = (StorageWeakRef(storage), number)

    def mark(self) -> int:
        """How many tensors were saved so far."""
        return len(self._uses.step.tensors)

    def saved_since(self, mark: int) -> list[int]:
        """Bytes of each tensor that forwards have saved since then, without inputs."""
        return [t.bytes for t in self._uses.step.tensors[mark:] if not t.input]

    def drop_to(self, mark: int) -> None:
        """Forgets what was saved since then: that forward runs again."""
        del self._uses.step.tensors[mark:]
        self._numbers = {k: known for k, known in self._numbers.items() if known[1] < mark}

    def held_bytes(self) -> int:
        """What PyTorch holds now; 0 where that is not measured."""
        if self._curve is None:
            return 0
        self.now()
        return self._curve.held

    def used(self, number: int) -> None:
        """A backward reads what saved() gave this number."""
        step = self._uses.step
        if 0 <= number < len(step.tensors):
            step.tensors[number].last_used = max(0, len(step.uses) - 1)

    def take(self) -> RecordedStep:
        """The step that ends here. The next one is recorded without details."""
        now = self.now()
        step, happened = self._largest or (self._uses.finish(now), self._happened)
        step.rounds = self._rounds + bool(self._uses.step.uses)
        step.detailed = self.recording
        if self._curve is not None:
            self._curve.stop()
            step.peak_bytes = self._curve.peak(step.begin, inf)
            if self.recording:
                self._measure(step, self._curve)
                step.measured = True
        device_times = self._clock.take()
        if device_times:
            step.take_times(_by(device_times, happened, step.end))
        self._curve = None
        self.recording = False
        self._clear()
        return step

    def _note(self, what: Any, about: tuple[Any, ...], times: tuple[float, ...]) -> None:
        what(self._uses, *about, *times)
        if self._replays:
            self._happened.append((what, about, times))

    def _measure(self, step: RecordedStep, curve: Curve) -> None:
        before = step.begin
        for use in step.uses:
            use.live_bytes = curve.at(use.entered)
            use.peak_bytes = self._peak(curve, use.entered, use.left)
            use.gap_peak_bytes = curve.peak(min(before, use.entered), use.entered)
            before = max(before, use.left)
        step.tail_peak_bytes = curve.peak(before, max(before, step.end))

    def _peak(self, curve: Curve, begin: float, end: float) -> int:
        """The most from `begin` to `end`, but for what is ignored."""
        peak = 0
        for first, last in self._ignored:
            if begin <= first and last <= end:
                peak = max(peak, curve.peak(begin, first))
                begin = last
        return max(peak, curve.peak(begin, end))


def _by(device_times: dict[float, float], happened: list[_Call], end: float) -> RecordedStep:
    """See Note [Two times]."""
    again = Uses()
    for what, about, times in happened:
        what(again, *about, *(device_times[time] for time in times))
    return again.finish(device_times[end])
