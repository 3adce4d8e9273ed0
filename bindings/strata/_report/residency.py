"""What every tier holds over a step, by its plan; and when the uses of units are.

residency(plan, trace)["host"][7]           # bytes, at the eighth use of a unit
moments(trace, record)[7]                   # (unit, backward, begin, end)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._config.choices import TO_SSD, leaves
from .._profiling.timeline import StepRecord

if TYPE_CHECKING:
    from .._core import StepPlan, Trace

Moment = tuple[int, bool, float, float]  # unit, backward, begin and end in seconds of the step


def residency(plan: StepPlan, trace: Trace) -> dict[str, list[int]]:
    """Bytes of each tier by use: what rests there, and the activations that are swapped to it from
    the use that saves them to the one that reads them last."""
    uses = len(trace["uses"])
    held = {
        "device": list(plan["device_curve"]),
        "host": [plan["resting_host_bytes"]] * uses,
        "ssd": [plan["resting_ssd_bytes"]] * uses,
    }
    for tensor in trace["tensors"]:
        activation = plan["units"][tensor["unit"]]["activation"]
        if not leaves(activation, tensor["input"]):
            continue
        tier = "ssd" if activation in TO_SSD else "host"
        for use in range(tensor["born"], min(tensor["last_used"] + 1, uses)):
            held[tier][use] += tensor["bytes"]
    return held


def moments(trace: Trace | None, record: StepRecord | None) -> list[Moment]:
    """The uses of the trace (of the record, where there is no trace), each at the time at which the
    record has it. What the record lacks takes no time; where it lacks most, the times are the
    traced ones, without waits."""
    measured = (
        [(u.unit, u.backward, u.entered - record.begin, u.left - record.begin) for u in record.uses]
        if record
        else []
    )
    if trace is None:
        return measured
    found: list[Moment] = []
    at = 0
    missing = 0
    for use in trace["uses"]:
        key = (use["unit"], use["backward"])
        next_at = next((i for i in range(at, len(measured)) if measured[i][:2] == key), None)
        if next_at is None:
            now = found[-1][3] if found else 0.0
            found.append((*key, now, now))
            missing += 1
        else:
            found.append(measured[next_at])
            at = next_at + 1
    return found if 2 * missing < len(found) else _traced(trace)


def _traced(trace: Trace) -> list[Moment]:
    """One use after the other, for as long as each computed."""
    result = []
    at = 0.0
    for use in trace["uses"]:
        at += use["gap_seconds"]
        result.append((use["unit"], use["backward"], at, at + use["seconds"]))
        at += use["seconds"]
    return result
