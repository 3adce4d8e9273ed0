"""How long steps took, over windows of seconds, what each resource reached in them, and the lower
bound that follows from it.

    windows = Windows()
    window = windows.add(record, step)     # behind every step of a plan; a Window when one is full
    windows.judged.step_seconds            # what is held against the lower bound
    pace = better(pace, pace_of(window, paper))
    lower_bound(paper, costs, pace)["seconds"]      # at most window.step_seconds

A single step says little: it may be the cold one, or the one that another program disturbed. So
steps are put together until they took WINDOW_SECONDS, WINDOW_STEPS of them at least. Pure
arithmetic on what StepLog and Recorder tell. Use from the thread that trains.

Note [Time in steps]. What lies between two steps (loading a batch, an evaluation) belongs to
neither, and updates go on meanwhile. So a lane's busy time counts as far as it lies in steps. A
span is told with the step in which it ended and may have begun in the one before: that part counts
too, behind what has been counted there. So busy time never exceeds the time of the steps.

Note [No window beats the bound]. A bound is a claim about what the machine can do at best. What was
measured beforehand is not that: caches are warmer in training, the disk was busy then, and the step
that was timed was cold. So each resource counts with the best that it reached in any window of this
run, and with what was measured beforehand where that was better:
  links, optimizer  what a step must move ÷ rate, where the rate of a window is what it moved ÷ its
                    busy time. What its steps must move counts where it moved less (on paper pages
                    are full; of others less moves). It was busy no longer than its steps took: so
                    this is no more than a step of the window took.
  computation       the least that a step of any window computed, which is part of its time.
  all together      what lanes take from each other is a claim too, and the hardest to measure. A
                    step of some window took T, so that nothing which a step needs takes longer.
Each part is at most the mean step of each window that went into it, hence so is the largest. The
windows that are judged are among them.

Note [Undisturbed]. Computation is measured beside other lanes, which slow it down, and the bound
slows it down once more. So of what was measured counts the share that the same plan's simulated
step says: what must be computed, by what is computed beside the other lanes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING, cast

from .._config.choices import SPEED_OF

if TYPE_CHECKING:
    from .._core import Bound, Costs, PaperPlan
    from .timeline import StepRecord
    from .uses import RecordedStep

WINDOW_SECONDS = 5.0
WINDOW_STEPS = 3
WINDOWS_KEPT = 12  # what was longer ago says little of now
SAMPLES_MAX = 64  # steps of a window whose uses are remembered one by one

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


@dataclass
class Window:
    """Steps in a row, together."""

    steps: int = 0
    seconds: float = 0.0  # of them, without what lay between them
    compute_seconds: float = 0.0  # of these
    # By lane: seconds of these in which it did anything, and bytes.
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPEED_OF, 0.0))
    moved: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPEED_OF, 0.0))
    times: Times | None = None  # None: steps were of several kinds

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
class _Open(Window):
    """A window that is not full."""

    order: Order | None = None  # empty: of several kinds
    samples: list[Times] = field(default_factory=list)
    every: int = 1  # so many steps are one sample

    def close(self) -> Window:
        self.times = _typical(self.samples) if self.order and self.samples else None
        return self


class Windows:
    """The windows of the steps under one plan."""

    def __init__(self) -> None:
        self.closed: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self._open = _Open()
        self._before: tuple[float, float] | None = None  # the step before, which counted
        self._counted = dict.fromkeys(SPEED_OF, 0.0)  # by lane: until when busy time has been

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
        window.samples = []
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


@dataclass(frozen=True)
class Pace:
    """The best of some windows."""

    step_seconds: float = inf
    compute_seconds: float = inf  # of a step, undisturbed
    rates: dict[str, float] = field(default_factory=dict)  # by name in Costs


def pace_of(window: Window, paper: PaperPlan) -> Pace:
    """What a window reached, whose steps ran under this plan. See Note [No window beats the
    bound]."""
    work = cast(dict[str, float], paper.bound().lane_work)
    rates = {}
    for lane, name in SPEED_OF.items():
        least = window.steps * work[lane]
        amount = least if lane == "update" else max(window.moved[lane], least)
        if amount > 0 and window.busy[lane] > 0:
            rates[name] = amount / window.busy[lane]
    computed = window.compute_seconds / window.steps
    # See Note [Undisturbed]. What a plan computes is never less than what must be computed.
    predicted = paper.simulate().lanes["compute"].busy_seconds
    alone = min(1.0, work["compute"] / predicted) if predicted > 0 else 1.0
    return Pace(window.step_seconds, computed * alone, rates)


def better(a: Pace, b: Pace) -> Pace:
    """The best of both."""
    rates = {
        name: max(a.rates.get(name, 0.0), b.rates.get(name, 0.0)) for name in SPEED_OF.values()
    }
    return Pace(
        min(a.step_seconds, b.step_seconds), min(a.compute_seconds, b.compute_seconds), rates
    )


def raised(costs: Costs, rates: dict[str, float]) -> Costs:
    """A machine whose links and workers are as fast as they were seen to be."""
    known = {name: getattr(costs, name) for name in rates}
    return costs.replace(**{n: max(rates[n], value) for n, value in known.items() if value > 0})


def lower_bound(paper: PaperPlan, costs: Costs, pace: Pace) -> Bound:
    """What no step could be faster than, as far as this run knows. See Note [No window beats the
    bound]."""
    best = raised(costs, pace.rates)
    computation = paper.bound(best).lane_work["compute"]
    if computation > 0:
        best.compute_scale = min(best.compute_scale, pace.compute_seconds / computation)
    bound = paper.bound(best)
    parts = ("seconds", "compute_seconds", "update_seconds", "ssd_seconds")
    return bound.replace(**{p: min(getattr(bound, p), pace.step_seconds) for p in parts})
