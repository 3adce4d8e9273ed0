"""From a recorded step to the planner's Trace.

trace = make_trace(step, state)
note_times(trace, later_step, first=True)    # times of a step that nothing was recorded in
uses_of(trace, rounds=2)                     # of a step of two rounds, as the core adopts them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from .._profiling.uses import RecordedStep
from .._storage.trace_file import SINGLE
from .recording import recorded_as

if TYPE_CHECKING:
    from .._core import Trace, TracedUnit, UnitPlan, Use
    from .._runtime.wrapped import Wrapped
    from .meta_trace import CountedStep

WARM_UP = 1.25  # a first time that is longer by this factor does not count


def make_trace(step: RecordedStep, state: Wrapped) -> Trace:
    """REQUIRES: the step was recorded in detail, and units are as they were in it."""
    units = []
    for unit, sizes in zip(state.units, state.session.plan["units"], strict=True):
        elements = sum(state.config["params"][i]["numel"] for i in unit.params)
        traced = traced_unit(unit.name, elements, sizes, unit.slices_max, unit.may_recompute)
        traced.may_swap = unit.may_swap
        traced.traced, traced.slices_traced = recorded_as(unit)
        units.append(traced)
    trace = trace_from(step, units)
    if step.measured:
        add_under_way(trace, state.landings.ahead_bytes)
    return trace


def add_under_way(trace: Trace, ahead_bytes: int) -> None:
    """Counts gradients that may be under way, at most so many bytes, beside what PyTorch held. In
    the traced step none were."""
    begun = 0
    for use in trace.uses:
        before = min(ahead_bytes, begun)
        use.live_bytes += before
        if use.gap_peak_bytes:
            use.gap_peak_bytes += before
        if use.backward:
            begun += trace.units[use.unit].grad_bytes
        use.peak_bytes += min(ahead_bytes, begun)
    trace.tail_peak_bytes += min(ahead_bytes, begun)


def traced_unit(
    name: str, elements: int, sizes: UnitPlan, slices_max: int, may_recompute: bool
) -> TracedUnit:
    """A unit of these `sizes`, recorded with all its activations."""
    return _core.TracedUnit(
        name=name,
        elements=elements,
        param_bytes=sizes["param_bytes"],
        grad_bytes=sizes["landing_bytes"],
        state_bytes=sizes["state_bytes"],
        chunks=sizes["chunks"],
        slices_max=slices_max,
        may_swap=True,
        may_recompute=may_recompute,
        traced="keep",
        slices_traced=1,
        code_bytes=sizes["resting_param_bytes"] if sizes["codes"] else 0,
        remote_elements=sizes["remote_params"],
        remote_param_bytes=sizes["remote_param_bytes"],
        remote_grad_bytes=sizes["remote_landing_bytes"],
        remote_state_bytes=sizes["remote_state_bytes"],
    )


def trace_from(step: RecordedStep | CountedStep, units: list[TracedUnit]) -> Trace:
    """What happened in a step, as the planner takes it."""
    single: dict[str, Any] = {name: getattr(step, name) for name in SINGLE}
    uses = [
        _core.Use(**{name: getattr(use, name) for name in _core.Use.fields}) for use in step.uses
    ]
    return _core.Trace(uses=uses, tensors=step.tensors, units=units, **single)


def uses_of(trace: Trace, rounds: int) -> Sequence[Use]:
    """Of a step that repeats the traced round so often, in order of enter."""
    if rounds == 1:
        return trace.uses
    begins = [r * trace.moments for r in range(rounds)]
    return [
        use.replace(enter=begin + use.enter, leave=begin + use.leave)
        for begin in begins
        for use in trace.uses
    ]


def note_times(trace: Trace, step: RecordedStep, first: bool) -> None:
    """Puts the times of a step into the trace whose units ran in the same modes: those of the
    `first` step at once, then what _typical() makes of them and later ones. Does nothing where the
    order of uses is another one.
    """
    if [(u.unit, u.backward) for u in trace.uses] != [(u.unit, u.backward) for u in step.uses]:
        return
    for old, use in zip(trace.uses, step.uses, strict=True):
        old.seconds = use.seconds if first else _typical(old.seconds, use.seconds)
        old.gap_seconds = use.gap_seconds if first else _typical(old.gap_seconds, use.gap_seconds)
    trace.tail_seconds = step.tail_seconds


def _typical(before: float, now: float) -> float:
    """The mean, unless the time before was still warming up."""
    return now if before > WARM_UP * now else (before + now) / 2
