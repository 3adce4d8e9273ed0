"""The uses of units in one round of a step, and how long each of them computed.

    uses = Uses()
    uses.enter(unit, False, wait_began, now)         # hooks tell when; see recorder.py
    uses.leave(unit, now)
    step = uses.finish(now)

Pure arithmetic on times: whichever clock they were read from. Use from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._core import SavedTensor


@dataclass
class TracedUse:
    """A unit from its enter to its leave, as the planner takes it (_core.Use). Hooks make one at
    every enter, and a struct of the core takes three times as long to make."""

    unit: int
    backward: bool
    enter: int  # moment
    leave: int = -1
    seconds: float = 0.0  # of computation, without waits and nested uses
    gap_seconds: float = 0.0  # of computation outside any unit, just before
    live_bytes: int = 0
    peak_bytes: int = 0
    gap_peak_bytes: int = 0


@dataclass
class RecordedUse(TracedUse):
    """With times: seconds of perf_counter(), see clock.py."""

    wait_began: float = 0.0  # when somebody began to wait for it
    entered: float = 0.0
    left: float = 0.0
    waited: float = 0.0


@dataclass
class RecordedStep:
    """One round of a step. See Note [Rounds] in recorder.py."""

    uses: list[RecordedUse] = field(default_factory=list)
    tensors: list[SavedTensor] = field(default_factory=list)
    rounds: int = 0
    moments: int = 0
    begin: float = 0.0  # of the round
    end: float = 0.0
    tail_seconds: float = 0.0
    tail_peak_bytes: int = 0
    detailed: bool = False  # tensors were recorded ...
    measured: bool = False  # ... and memory too
    peak_bytes: int | None = None  # of PyTorch's memory, where it was measured
    landed: bool = False  # a gradient has; a backward may read no page

    @property
    def has_backward(self) -> bool:
        """Whether the round has come to its backward."""
        return self.landed or any(use.backward for use in self.uses)

    def take_times(self, other: RecordedStep) -> None:
        """The times of the same round by another clock."""
        for mine, use in zip(self.uses, other.uses, strict=True):
            mine.wait_began, mine.entered, mine.left = use.wait_began, use.entered, use.left
            mine.seconds, mine.waited = use.seconds, use.waited
            mine.gap_seconds = use.gap_seconds
        self.begin, self.end, self.tail_seconds = other.begin, other.end, other.tail_seconds


class Uses:
    """Puts together one round."""

    def __init__(self) -> None:
        self.step = RecordedStep()
        self._open: list[RecordedUse] = []  # innermost last
        self._mark: float | None = None  # computation is accounted for until here
        self._gap = 0.0
        self._last: RecordedUse | None = None  # closed, with nothing after it

    def is_over(self, backward: bool) -> bool:
        """Whether the next enter() belongs to another round: a forward behind a backward."""
        step = self.step
        return bool(not backward and step.uses and step.has_backward and not self._open)

    def is_open(self, unit: int) -> bool:
        """Whether the unit is in use."""
        return any(use.unit == unit for use in self._open)

    def enter(self, unit: int, backward: bool, wait_began: float, now: float) -> None:
        """A unit that was not entered is, from `now` on."""
        step = self.step
        self._account(wait_began)
        self._mark = now
        last = self._last
        if last is not None and last.unit == unit and last.backward == backward:
            # Autograd enters a unit once for each of its nodes: they are one use.
            last.seconds += self._gap
            last.waited += now - wait_began
            step.moments -= 1
            use = last
        else:
            use = RecordedUse(
                unit,
                backward,
                step.moments,
                gap_seconds=self._gap,
                wait_began=wait_began,
                entered=now,
                waited=now - wait_began,
            )
            if not step.uses:
                step.begin = wait_began
            step.uses.append(use)
            step.moments += 1
        self._gap = 0.0
        self._last = None
        self._open.append(use)

    def leave(self, unit: int, now: float) -> None:
        """It is not entered any more. REQUIRES: is_open()."""
        use = next(use for use in reversed(self._open) if use.unit == unit)
        self._account(now)
        self._mark = now
        self._open.remove(use)
        use.left = now
        use.leave = self.step.moments
        self.step.moments += 1
        self._last = None if self._open else use

    def pause(self, begin: float, end: float) -> None:
        """From `begin` to `end` nothing was computed."""
        if self._mark is None:
            return
        self._account(begin)
        self._mark = end
        if self._open:
            self._open[-1].waited += end - begin

    def finish(self, now: float) -> RecordedStep:
        """The round that ends here."""
        step = self.step
        self._account(now)
        for use in reversed(self._open):
            use.left, use.leave = now, step.moments
            step.moments += 1
        step.end = now
        step.tail_seconds = self._gap
        return step

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
