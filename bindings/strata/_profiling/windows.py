"""How long steps took, over windows of seconds, and what each resource reached in them.

    windows = Windows()
    window = windows.add(record, step)     # behind every step of a plan; a Window when one is full
    windows.judged.step_seconds            # what is held against the lower bound

A single step says little: it may be the cold one, or the one that another program disturbed. So
steps are put together until they took WINDOW_SECONDS, WINDOW_STEPS of them at least. Pure
arithmetic on what StepLog and Recorder tell. Use from the thread that trains.

Note [Time in steps]. What lies between two steps (loading a batch, an evaluation) belongs to
neither, and updates go on meanwhile. So a lane's busy time counts as far as it lies in steps. A
span is told with the step in which it ended and may have begun in the one before: that part counts
too, behind what has been counted there. So busy time never exceeds the time of the steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timeline import StepRecord
    from .uses import RecordedStep

WINDOW_SECONDS = 5.0
WINDOW_STEPS = 3
WINDOWS_KEPT = 12  # what was longer ago says little of now
SAMPLES_MAX = 64  # steps of a window whose uses are remembered one by one
LANES = ("upload", "download", "read", "write", "update")

Order = tuple[tuple[int, bool], ...]  # of uses: unit, backward


@dataclass(frozen=True)
class Times:
    """What uses of a typical step computed, and what was computed before each and in the end."""

    order: Order
    uses: list[float]
    gaps: list[float]
    tail: float

    def along(self, order: Order) -> tuple[list[float], list[float], float] | None:
        """The same for a step that has further uses, as one that recomputes has: there they compute
        nothing. None where it is another step."""
        uses, gaps, mine = [], [], 0
        for use in order:
            there = mine < len(self.order) and self.order[mine] == use
            uses.append(self.uses[mine] if there else 0.0)
            gaps.append(self.gaps[mine] if there else 0.0)
            mine += there
        return (uses, gaps, self.tail) if mine == len(self.order) else None


@dataclass(frozen=True)
class Window:
    """Steps in a row, together."""

    steps: int
    seconds: float  # of them, without what lay between them
    compute_seconds: float  # of these
    busy: dict[str, float]  # of these, by lane: seconds in which it did anything
    moved: dict[str, float]  # by lane: bytes
    times: Times | None  # None: steps were of several kinds

    @property
    def step_seconds(self) -> float:
        """The mean."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Judged:
    """What is told as the speed of a run."""

    step_seconds: float
    steps: int
    seconds: float  # of these
    whole: bool  # False: there was less than one window


@dataclass
class _Open:
    """A window that is not full."""

    steps: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    moved: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    order: Order | None = None  # empty: of several kinds
    samples: list[Times] = field(default_factory=list)
    every: int = 1  # so many steps are one sample

    def close(self) -> Window:
        times = _typical(self.samples) if self.order and self.samples else None
        return Window(
            self.steps, self.seconds, self.compute_seconds, dict(self.busy), dict(self.moved), times
        )


class Windows:
    """The windows of the steps under one plan."""

    def __init__(self) -> None:
        self.closed: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self._open = _Open()
        self._before: tuple[float, float] | None = None  # the step before, which counted
        self._counted = dict.fromkeys(LANES, 0.0)  # by lane: until when busy time has been

    def add(self, record: StepRecord, step: RecordedStep) -> Window | None:
        """Counts a step. Returns the window that it fills."""
        window, before = self._open, self._before
        now = (max(record.begin, before[1]) if before else record.begin, record.end)
        steps = [before, now] if before and window.steps else [now]
        window.steps += 1
        window.seconds += record.seconds
        window.compute_seconds += step.tail_seconds
        window.compute_seconds += sum(use.seconds + use.gap_seconds for use in step.uses)
        for span in sorted(record.spans, key=lambda span: span["begin_ns"]):
            lane = span["track"]
            if lane not in window.busy:
                continue
            begin = max(span["begin_ns"] * 1e-9, self._counted[lane])
            end = span["end_ns"] * 1e-9
            window.moved[lane] += span["bytes"]
            window.busy[lane] += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in steps)
            self._counted[lane] = max(self._counted[lane], end)
        self._before = now
        self._sample(step)
        if window.seconds < WINDOW_SECONDS or window.steps < WINDOW_STEPS:
            return None
        self.closed.append(window.close())
        self._open = _Open()
        return self.closed[-1]

    def interrupt(self) -> None:
        """A step came in between that does not count."""
        self._before = None

    @property
    def begun(self) -> Window | None:
        """What there is while there is no whole window."""
        return self._open.close() if self._open.steps and not self.closed else None

    @property
    def times(self) -> Times | None:
        """Of a typical step of the windows that are kept. None: there is none."""
        known = [window.times for window in self.closed if window.times is not None]
        alike = [times for times in known if times.order == known[-1].order]
        return _typical(alike) if alike else None

    @property
    def judged(self) -> Judged | None:
        """The speed: of the windows that are kept, the middle one. None before the first step."""
        windows = list(self.closed) or ([self.begun] if self.begun else [])
        if not windows:
            return None
        return Judged(
            median(window.step_seconds for window in windows),
            sum(window.steps for window in windows),
            sum(window.seconds for window in windows),
            bool(self.closed),
        )

    def _sample(self, step: RecordedStep) -> None:
        window = self._open
        order = tuple((use.unit, use.backward) for use in step.uses)
        if window.order is None:
            window.order = order
        elif window.order != order:
            window.order = ()
        if not window.order or (window.steps - 1) % window.every:
            return
        uses = [use.seconds for use in step.uses]
        gaps = [use.gap_seconds for use in step.uses]
        window.samples.append(Times(order, uses, gaps, step.tail_seconds))
        if len(window.samples) == SAMPLES_MAX:
            del window.samples[1::2]
            window.every *= 2


def _typical(samples: list[Times]) -> Times:
    """By use, the median: one late interrupt must not look like a slow unit."""
    uses = [median(each) for each in zip(*(sample.uses for sample in samples), strict=True)]
    gaps = [median(each) for each in zip(*(sample.gaps for sample in samples), strict=True)]
    return Times(samples[0].order, uses, gaps, median(sample.tail for sample in samples))
