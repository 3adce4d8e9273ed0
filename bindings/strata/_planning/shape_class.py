"""What the user wants of plans, the batches that one plan serves, and what a run teaches about its
plans: how fast the machine was seen to be, how long units compute by now, and what no plan could be
faster than.

    found, classes = find_class(classes, shape, before)
    following.begin(found, paper)                   # a plan has been made for a class of batches
    window = following.note(found, record, step)    # behind every step under it
    following.bound(found)["seconds"]

Use from the thread that trains.

Note [Following]. A plan is made from two timed steps, which may have been cold or disturbed. So
behind every window of steps its times follow what the last windows measured: predictions are of
the run as it is, not as it began. The plan itself stays: another one moves pages, which takes as
long as some steps. Only where the predicted step has changed by REPLAN_FACTOR since the plan was
made is another plan looked for, and it is taken only if it is faster by REPLAN_GAIN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, cast

import torch

from .._profiling.windows import Pace, Window, Windows, better, lower_bound, pace_of, raised

if TYPE_CHECKING:
    from .. import _core
    from .._core import Bound, Costs, PaperPlan, Plan, StepPlan, Trace
    from .._profiling.timeline import StepRecord
    from .._profiling.uses import RecordedStep

Shape = tuple[tuple[int, ...], ...]

TIGHT_SHARE = 0.8  # of the device budget
CLASSES_MAX = 16
SMALL_SHARE = 0.5  # of a class's elements: smaller batches get a class of their own


@dataclass(frozen=True)
class Goal:
    """What the user asked for."""

    activations: str  # one of choices.ACTIVATIONS
    split: int | None
    device_bytes: int  # frames, activations and PyTorch's own memory together
    param_bytes: int  # of the device, for parameters, until activations are known
    workers: int
    io_engine: str
    alone: bool = True  # no other ranks train with this process


@dataclass
class ShapeClass:
    """Batches that one plan serves."""

    shape: Shape
    trace: Trace | None = None  # None: to be recorded
    timed: int = 0  # steps
    rounds: int = 1  # of its last step
    smallest: float = inf  # elements of the batches that its steps begin with
    paper: _core.PaperPlan | None = None  # None: to be timed
    plan: StepPlan | None = None  # of `paper`, which makes it anew each time it is asked
    device_peak: int = 0  # frames and PyTorch's memory, as measured under the plan; 0: not yet
    reserve: int = 0  # bytes of the device that plans leave alone, because one turned out too large
    number: int = 0  # of the plan, among all of the run
    planned_seconds: float = 0.0  # of a step, as predicted when the plan was made ...
    predicted_seconds: float = 0.0  # ... and as its times are by now
    steady: bool = False  # a step under the plan has moved what it wants elsewhere
    windows: Windows = field(default_factory=Windows)  # of the steps under the plan
    pace: Pace = field(default_factory=Pace)  # the best of all windows, under this plan or another

    @property
    def to_check(self) -> bool:
        """Whether the device comes so near its budget that it has to be measured under the plan."""
        if self.plan is None or self.device_peak:
            return False
        peak = self.plan.peaks["device"]
        return peak.bytes > TIGHT_SHARE * peak.budget

    @property
    def elements(self) -> int:
        """Of all tensors of the batch."""
        return sum(torch.Size(shape).numel() for shape in self.shape)

    def serves(self, shape: Shape) -> bool:
        """Whether a batch of this shape is nowhere larger than the recorded one."""
        return len(shape) == len(self.shape) and all(
            len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))
            for a, b in zip(shape, self.shape, strict=True)
        )


def find_class(
    classes: list[ShapeClass], shape: Shape, before: ShapeClass | None
) -> tuple[ShapeClass, list[ShapeClass]]:
    """The class of a batch, new or known, and all classes with it. `before`: that of the step so
    far; it serves every batch that is nowhere larger."""
    if before is not None and before.serves(shape):
        return before, classes
    elements = ShapeClass(shape).elements
    serving = [c for c in classes if c.trace is not None and c.serves(shape)]
    best = min(serving, key=lambda c: c.elements, default=None)
    roomy = best is not None and elements < min(best.elements * SMALL_SHARE, best.smallest)
    if best is not None and not (roomy and len(classes) < CLASSES_MAX):
        return best, classes
    if known := next((c for c in classes if c.shape == shape), None):
        return known, classes
    new = ShapeClass(shape)
    # What a new class serves as well is not needed any more.
    return new, [*[c for c in classes if c.trace is not None][-CLASSES_MAX + 1 :], new]


def on_device(plan: StepPlan) -> list[bool]:
    """By unit: whether all of it rests on the device."""
    return [unit.on_device for unit in plan.units]


def device_pages(resting: Plan, units: list[bool], param_bytes: int) -> int:
    """Bytes that pages take of the device: those of parameters on their way, and whole units."""
    return param_bytes + sum(
        unit["param_bytes"] + unit["grad_bytes"] + unit["state_bytes"]
        for unit, there in zip(resting["units"], units, strict=True)
        if there
    )


REPLAN_FACTOR = 1.25
REPLAN_GAIN = 0.1


class Following:
    """Of all plans of one wrapped model: links and workers are the same for all."""

    def __init__(self) -> None:
        self.costs: Costs | None = None  # as measured beforehand; None: not yet
        self._pace = Pace()  # its rates
        self._plans = 0

    def known(self) -> Costs:
        """What the machine can do, by all that is known now. REQUIRES: costs."""
        assert self.costs is not None
        return raised(self.costs, self._pace.rates)

    def begin(self, found: ShapeClass, paper: PaperPlan) -> None:
        """A plan was made."""
        self._plans += 1
        found.number = self._plans
        found.plan = paper.plan
        found.device_peak = 0
        found.windows = Windows()
        found.steady = False
        found.predicted_seconds = found.planned_seconds = paper.simulate().step_seconds
        # What was timed counts as well: nothing disturbed it.
        found.pace = better(found.pace, Pace(inf, paper.bound().lane_work["compute"]))
        found.paper = paper  # last: there is a plan

    def note(self, found: ShapeClass, record: StepRecord, step: RecordedStep) -> Window | None:
        """A step under a plan has ended. Returns the window that it fills."""
        if not found.steady:  # this step moved what the plan wants elsewhere
            found.steady = True
            return None
        window = found.windows.add(record, step)
        if window is not None:
            self._follow(found, window)
        return window

    def _follow(self, found: ShapeClass, window: Window) -> None:
        """See Note [Following]."""
        paper = cast("PaperPlan", found.paper)
        found.pace = better(found.pace, pace_of(window, paper))
        self._pace = better(self._pace, Pace(rates=found.pace.rates))
        trace, times = cast("Trace", found.trace), found.windows.times
        order = tuple((use.unit, use.backward) for use in trace.uses)
        measured = times.along(order) if times is not None else None
        if measured is None:
            return
        found.paper = paper.followed(self.known(), measured)
        found.trace = found.paper.trace
        found.predicted_seconds = found.paper.simulate().step_seconds

    def differs(self, found: ShapeClass) -> bool:
        """Whether the step is another one than the plan was made for."""
        ratio = found.predicted_seconds / max(found.planned_seconds, 1e-12)
        return not 1 / REPLAN_FACTOR < ratio < REPLAN_FACTOR

    def worth(self, found: ShapeClass, other: PaperPlan) -> bool:
        """Whether another plan is so much faster that its moves pay. Asked once: the plan that
        stays is from now on made for the step as it is."""
        found.planned_seconds = found.predicted_seconds
        return other.simulate().step_seconds < (1 - REPLAN_GAIN) * found.predicted_seconds

    def bound(self, found: ShapeClass) -> Bound:
        """What no step could be faster than, the steps included that are judged. REQUIRES: a plan
        was made."""
        assert self.costs is not None
        assert found.paper is not None
        pace = better(found.pace, self._pace)
        if found.windows.begun is not None:
            pace = better(pace, pace_of(found.windows.begun, found.paper))
        return lower_bound(found.paper, self.costs, pace)
