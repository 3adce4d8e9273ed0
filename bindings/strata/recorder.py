"""Records a step as the planner wants it: uses of units with their times, and on request the
tensors that autograd saves, by storage, and the memory that PyTorch takes.

    recorder.begin()                # from here on in detail
    ...                             # hooks call enter, leave, pause, ignore, inputs, saved and used
    step = recorder.take()          # at the end of every step

Times are always noted, which costs about a microsecond; `recording` is true while saved tensors and
memory are too. Use from the thread that trains; autograd's threads call it under the GIL.

Note [Rounds]. Where several forwards and backwards make one step, each pair is a round. What take()
returns is the last one: they are alike, and the plan is the same for each.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .memory_curve import MemoryCurve

NOT_RECORDED = -1

log = logging.getLogger("strata")


@dataclass
class RecordedUse:
    """A unit from its enter to its leave. Times are perf_counter() seconds."""

    unit: int
    backward: bool
    enter: int  # moment
    asked: float  # when somebody began to wait for it
    entered: float
    gap_seconds: float  # of computation outside any unit, just before
    leave: int = -1
    left: float = 0.0
    seconds: float = 0.0  # of computation, without waits and nested uses
    waited: float = 0.0
    live_bytes: int = 0
    peak_bytes: int = 0
    gap_peak_bytes: int = 0


@dataclass
class RecordedTensor:
    """A storage that autograd saved."""

    unit: int
    bytes: int
    born: int  # index of the use that saved it
    last_used: int
    input: bool


@dataclass
class RecordedStep:
    """One round of a step, the last one."""

    uses: list[RecordedUse] = field(default_factory=list)
    tensors: list[RecordedTensor] = field(default_factory=list)
    rounds: int = 0
    moments: int = 0
    begin: float = 0.0  # of the round
    end: float = 0.0
    tail_seconds: float = 0.0
    tail_peak_bytes: int = 0
    detailed: bool = False  # tensors were recorded ...
    measured: bool = False  # ... and memory too


class Recorder:
    """What happened since the last take()."""

    def __init__(self) -> None:
        self.recording = False
        self._curve: MemoryCurve | None = None
        self._depth: dict[int, int] = {}  # by unit: enters without their leave
        self._clear()

    def _clear(self) -> None:
        self._step = RecordedStep()
        self._open: list[RecordedUse] = []  # innermost last
        self._mark: float | None = None  # computation is accounted for until here
        self._gap = 0.0
        self._last: RecordedUse | None = None  # closed, with nothing after it
        self._ignored: list[tuple[float, float]] = []
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._inputs: dict[int, StorageWeakRef] = {}

    @property
    def in_step(self) -> bool:
        """Whether anything was used since the last take()."""
        return bool(self._step.uses)

    def begin(self) -> None:
        """Records the step that begins in detail. It costs some tens of microseconds a tensor."""
        if self.recording:
            return
        self._clear()
        self.recording = True
        self._curve = MemoryCurve.start()
        if self._curve is None:
            log.info("a profiler is running, so PyTorch's own memory is not measured in this step")

    def enter(self, unit: int, backward: bool, asked: float, recorded: bool) -> None:
        """A unit has been entered; `asked`: perf_counter() before waiting for it."""
        depth = self._depth.get(unit, 0)
        self._depth[unit] = depth + 1
        if not recorded or depth:
            return
        now = perf_counter()
        step = self._step
        if not backward and step.uses and step.uses[-1].backward and not self._open:
            self._begin_round()
            step = self._step
        self._account(asked)
        self._mark = now
        last = self._last
        if last is not None and last.unit == unit and last.backward == backward:
            # Autograd enters a unit once for each of its nodes: they are one use.
            last.seconds += self._gap
            last.waited += now - asked
            step.moments -= 1
            use = last
        else:
            use = RecordedUse(unit, backward, step.moments, asked, now, self._gap)
            use.waited = now - asked
            if not step.uses:
                step.begin = asked
            step.uses.append(use)
            step.moments += 1
        self._gap = 0.0
        self._last = None
        self._open.append(use)

    def leave(self, unit: int) -> None:
        """A unit is left."""
        depth = self._depth.get(unit, 0)
        self._depth[unit] = max(0, depth - 1)
        if depth != 1:
            return
        use = next((use for use in reversed(self._open) if use.unit == unit), None)
        if use is None:
            return
        now = perf_counter()
        self._account(now)
        self._mark = now
        self._open.remove(use)
        use.left = now
        use.leave = self._step.moments
        self._step.moments += 1
        self._last = None if self._open else use

    def pause(self, begin: float, end: float) -> None:
        """From `begin` to `end` nothing was computed: somebody waited for bytes, or moved them."""
        if self._mark is None:
            return
        self._account(begin)
        self._mark = end
        if self._open:
            self._open[-1].waited += end - begin

    def ignore(self, begin: float, end: float) -> None:
        """As pause(), for what is no part of the step: its memory does not count either."""
        self.pause(begin, end)
        if self.recording:
            self._ignored.append((begin, end))

    def inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that a unit's forward was called with. Call while `recording`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._inputs[storage._cdata] = StorageWeakRef(storage)

    def saved(self, unit: int, tensor: torch.Tensor) -> int:
        """Autograd saves a tensor in a unit's forward. Returns a number for used(), the same for
        every view of one storage. Call while `recording`, and not for a recomputation."""
        if not self._step.uses:
            return NOT_RECORDED
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        given = self._inputs.get(key)
        born = max(i for i, use in enumerate(self._step.uses) if use.unit == unit)
        self._step.tensors.append(
            RecordedTensor(
                unit, storage.nbytes(), born, born, given is not None and not given.expired()
            )
        )
        number = len(self._step.tensors) - 1
        self._numbers[key] = (StorageWeakRef(storage), number)
        return number

    def used(self, number: int) -> None:
        """A backward reads what saved() gave this number."""
        if 0 <= number < len(self._step.tensors):
            self._step.tensors[number].last_used = max(0, len(self._step.uses) - 1)

    def take(self) -> RecordedStep:
        """The step that ends here. The next one is recorded without details."""
        step = self._step
        now = perf_counter()
        self._account(now)
        for use in reversed(self._open):
            use.left, use.leave = now, step.moments
            step.moments += 1
        step.end = now
        step.tail_seconds = self._gap
        step.rounds += bool(step.uses)
        step.detailed = self.recording
        if self._curve is not None:
            self._curve.stop()
            self._measure(step, self._curve)
            step.measured = True
        self._curve = None
        self.recording = False
        self._clear()
        return step

    def _begin_round(self) -> None:
        rounds = self._step.rounds + 1
        self._clear()
        self._step.rounds = rounds

    def _account(self, until: float) -> None:
        """Computation since the mark belongs to the innermost use, or to the gap between uses."""
        if self._mark is None:
            return
        seconds = max(0.0, until - self._mark)
        if self._open:
            self._open[-1].seconds += seconds
        else:
            self._gap += seconds
        self._mark = until

    def _measure(self, step: RecordedStep, curve: MemoryCurve) -> None:
        before = step.begin
        for use in step.uses:
            use.live_bytes = curve.at(use.entered)
            use.peak_bytes = self._peak(curve, use.entered, use.left)
            use.gap_peak_bytes = curve.peak(min(before, use.entered), use.entered)
            before = max(before, use.left)
        step.tail_peak_bytes = curve.peak(before, max(before, step.end))

    def _peak(self, curve: MemoryCurve, begin: float, end: float) -> int:
        """The most from `begin` to `end`, but for what is ignored."""
        peak = 0
        for first, last in self._ignored:
            if begin <= first and last <= end:
                peak = max(peak, curve.peak(begin, first))
                begin = last
        return max(peak, curve.peak(begin, end))
