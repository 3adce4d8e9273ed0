"""From a recorded step to the planner's Trace.

trace = make_trace(step, state)
refresh_times(trace, later_step, state)      # times of a step that nothing was recorded in
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .recorder import RecordedStep

if TYPE_CHECKING:
    from ._core import ActivationName, Trace
    from .wrapped import Wrapped


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
                "grad_bytes": sizes["grad_bytes"],
                "state_bytes": sizes["state_bytes"],
                "chunks": sizes["chunks"],
                "slices_max": unit.slices_max,
                "may_swap": unit.may_swap,
                "may_recompute": unit.may_recompute,
                "traced": _traced(unit.activation),
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


def refresh_times(trace: Trace, step: RecordedStep, state: Wrapped) -> None:
    """Puts the times of `step` into the trace, as if its units had run as in the traced step.

    Does nothing where the two steps differ in the order of their uses.
    """
    if [(u["unit"], u["backward"]) for u in trace["uses"]] != [
        (u.unit, u.backward) for u in step.uses
    ]:
        return
    forward = [0.0] * len(state.units)
    for use in step.uses:
        if not use.backward:
            forward[use.unit] += use.seconds
    for old, use in zip(trace["uses"], step.uses, strict=True):
        seconds = use.seconds
        if use.backward:
            ran = _traced(state.units[use.unit].activation)
            traced = trace["units"][use.unit]["traced"]
            # A unit has one backward use; where it has several, only the first recomputes.
            if ran != traced:
                seconds += forward[use.unit] if traced == "recompute" else -forward[use.unit]
                forward[use.unit] = 0.0
        old["seconds"] = max(0.0, seconds)
        old["gap_seconds"] = use.gap_seconds
    trace["tail_seconds"] = step.tail_seconds


def _traced(activation: ActivationName) -> ActivationName:
    return "recompute" if activation == "recompute" else "keep"
