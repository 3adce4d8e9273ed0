"""From a recorded step to the planner's Trace.

trace = make_trace(step, state)
note_times(trace, later_step, first=True)    # times of a step that nothing was recorded in
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._profiling.uses import RecordedStep
from .recording import recorded_as

if TYPE_CHECKING:
    from .._core import Trace
    from .._runtime.wrapped import Wrapped

WARM_UP = 1.25  # a first time that is longer by this factor does not count


def make_trace(step: RecordedStep, state: Wrapped) -> Trace:
    """REQUIRES: the step was recorded in detail, and units are as they were in it."""
    resting = state.session.plan["units"]
    trace: Trace = {
        "uses": [
            {
                "unit": use.unit,
                "backward": use.backward,
                "enter": use.enter,
                "leave": use.leave,
                "seconds": use.seconds,
                "gap_seconds": use.gap_seconds,
                "live_bytes": use.live_bytes,
                "peak_bytes": use.peak_bytes,
                "gap_peak_bytes": use.gap_peak_bytes,
            }
            for use in step.uses
        ],
        "moments": step.moments,
        "units": [
            {
                "name": unit.name,
                "elements": sum(state.config["params"][i]["numel"] for i in unit.params),
                "param_bytes": sizes["param_bytes"],
                "grad_bytes": sizes["landing_bytes"],
                "state_bytes": sizes["state_bytes"],
                "chunks": sizes["chunks"],
                "slices_max": unit.slices_max,
                "may_swap": unit.may_swap,
                "may_recompute": unit.may_recompute,
                "traced": recorded_as(unit)[0],
                "slices_traced": recorded_as(unit)[1],
            }
            for unit, sizes in zip(state.units, resting, strict=True)
        ],
        "tensors": [
            {
                "unit": tensor.unit,
                "bytes": tensor.bytes,
                "born": tensor.born,
                "last_used": tensor.last_used,
                "input": tensor.input,
            }
            for tensor in step.tensors
        ],
        "tail_seconds": step.tail_seconds,
        "tail_peak_bytes": step.tail_peak_bytes,
    }
    return trace


def note_times(trace: Trace, step: RecordedStep, first: bool) -> None:
    """Puts the times of a step into the trace whose units ran in the same modes: those of the
    `first` step at once, then what _typical() makes of them and later ones. Does nothing where the
    order of uses is another one.
    """
    if [(u["unit"], u["backward"]) for u in trace["uses"]] != [
        (u.unit, u.backward) for u in step.uses
    ]:
        return
    for old, use in zip(trace["uses"], step.uses, strict=True):
        old["seconds"] = use.seconds if first else _typical(old["seconds"], use.seconds)
        old["gap_seconds"] = (
            use.gap_seconds if first else _typical(old["gap_seconds"], use.gap_seconds)
        )
    trace["tail_seconds"] = step.tail_seconds


def _typical(before: float, now: float) -> float:
    """The mean, unless the time before was still warming up."""
    return now if before > WARM_UP * now else (before + now) / 2
