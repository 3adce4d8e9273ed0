"""What a run teaches about its plans: how fast the machine was seen to be, how long units compute
by now, and what no plan could be faster than.

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

from math import inf
from typing import TYPE_CHECKING, cast

from .._profiling.reached import Pace, better, lower_bound, pace_of, raised
from .._profiling.windows import Window, Windows

if TYPE_CHECKING:
    from .._core import Bound, Costs, PaperPlan, Trace
    from .._profiling.timeline import StepRecord
    from .._profiling.uses import RecordedStep
    from .shape_class import ShapeClass

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
        found.settled = False
        found.predicted_seconds = found.planned_seconds = paper.simulate()["step_seconds"]
        # What was timed counts as well: nothing disturbed it.
        found.pace = better(found.pace, Pace(inf, paper.bound()["lane_work"]["compute"]))
        found.paper = paper  # last: there is a plan

    def note(self, found: ShapeClass, record: StepRecord, step: RecordedStep) -> Window | None:
        """A step under a plan has ended. Returns the window that it fills."""
        if not found.settled:  # this step moved what the plan wants elsewhere
            found.settled = True
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
        order = tuple((use["unit"], use["backward"]) for use in trace["uses"])
        measured = times.along(order) if times is not None else None
        if measured is None:
            return
        found.paper = paper.followed(self.known(), measured)
        found.trace = _with_times(trace, found.paper)
        found.predicted_seconds = found.paper.simulate()["step_seconds"]

    def differs(self, found: ShapeClass) -> bool:
        """Whether the step is another one than the plan was made for."""
        ratio = found.predicted_seconds / max(found.planned_seconds, 1e-12)
        return not 1 / REPLAN_FACTOR < ratio < REPLAN_FACTOR

    def worth(self, found: ShapeClass, other: PaperPlan) -> bool:
        """Whether another plan is so much faster that its moves pay. Asked once: the plan that
        stays is from now on made for the step as it is."""
        found.planned_seconds = found.predicted_seconds
        return other.simulate()["step_seconds"] < (1 - REPLAN_GAIN) * found.predicted_seconds

    def bound(self, found: ShapeClass) -> Bound:
        """What no step could be faster than, the steps included that are judged. REQUIRES: a plan
        was made."""
        assert self.costs is not None
        assert found.paper is not None
        pace = better(found.pace, self._pace)
        if found.windows.begun is not None:
            pace = better(pace, pace_of(found.windows.begun, found.paper))
        return lower_bound(found.paper, self.costs, pace)


def _with_times(trace: Trace, paper: PaperPlan) -> Trace:
    seconds, gaps, tail = paper.times
    uses = [
        {**use, "seconds": mine, "gap_seconds": gap}
        for use, mine, gap in zip(trace["uses"], seconds, gaps, strict=True)
    ]
    return cast("Trace", {**trace, "uses": uses, "tail_seconds": tail})
