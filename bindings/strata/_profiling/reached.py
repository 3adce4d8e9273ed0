"""The best that each resource reached in a run, and the lower bound that follows from it.

    pace = better(pace, pace_of(window, paper))
    lower_bound(paper, costs, pace)["seconds"]      # at most window.step_seconds

Note [No window beats the bound]. A bound is a claim about what the machine can do at best. What was
measured beforehand is not that: caches are warmer in training, the disk was busy then, and the step
that was timed was cold. So each resource counts with the best that it reached in any window of this
run, and with what was measured beforehand where that was better:
  links, optimizer  what a step must move ÷ rate, where the rate of a window is what it moved ÷ its
                    busy time. It moved what its steps must, at least, and was busy no longer than
                    they took: so this is no more than a step of the window took.
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

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, cast

from .windows import Window

if TYPE_CHECKING:
    from .._core import Bound, Costs, PaperPlan

# By lane, where Costs has its rate.
RATES = {
    "upload": "upload_bytes_s",
    "download": "download_bytes_s",
    "read": "read_bytes_s",
    "write": "write_bytes_s",
    "update": "update_elements_s",
}


@dataclass(frozen=True)
class Pace:
    """The best of some windows."""

    step_seconds: float = inf
    compute_seconds: float = inf  # of a step, undisturbed
    rates: dict[str, float] = field(default_factory=dict)  # by name in Costs


def pace_of(window: Window, paper: PaperPlan) -> Pace:
    """What a window reached, whose steps ran under this plan. See Note [No window beats the
    bound]."""
    work = cast(dict[str, float], paper.bound()["lane_work"])
    rates = {}
    for lane, name in RATES.items():
        least = window.steps * work[lane]
        amount = least if lane == "update" else max(window.moved[lane], least)
        if amount > 0 and window.busy[lane] > 0:
            rates[name] = amount / window.busy[lane]
    computed = window.compute_seconds / window.steps
    # See Note [Undisturbed]. What a plan computes is never less than what must be computed.
    predicted = paper.simulate()["lanes"]["compute"]["busy_seconds"]
    alone = min(1.0, work["compute"] / predicted) if predicted > 0 else 1.0
    return Pace(window.step_seconds, computed * alone, rates)


def better(a: Pace, b: Pace) -> Pace:
    """The best of both."""
    rates = {name: max(a.rates.get(name, 0.0), b.rates.get(name, 0.0)) for name in RATES.values()}
    return Pace(
        min(a.step_seconds, b.step_seconds), min(a.compute_seconds, b.compute_seconds), rates
    )


def raised(costs: Costs, rates: dict[str, float]) -> Costs:
    """A machine whose links and workers are as fast as they were seen to be."""
    best = {name: max(value, costs[name]) for name, value in rates.items() if costs[name] > 0}  # type: ignore[literal-required]
    return cast("Costs", {**costs, **best})


def lower_bound(paper: PaperPlan, costs: Costs, pace: Pace) -> Bound:
    """What no step could be faster than, as far as this run knows. See Note [No window beats the
    bound]."""
    best = raised(costs, pace.rates)
    computation = paper.bound(best)["lane_work"]["compute"]
    if computation > 0:
        best["compute_scale"] = min(best["compute_scale"], pace.compute_seconds / computation)
    bound: Any = paper.bound(best)
    for part in ("seconds", "compute_seconds", "update_seconds", "ssd_seconds"):
        bound[part] = min(bound[part], pace.step_seconds)
    return cast("Bound", bound)
