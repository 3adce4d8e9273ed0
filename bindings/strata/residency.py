"""What every tier holds over a step, by its plan; and when the uses of units are.

residency(plan, trace)["host"][7]           # bytes, at the eighth use of a unit
moments(trace, record)[7]                   # (unit, backward, begin, end)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .timeline import StepRecord

if TYPE_CHECKING:
    from ._core import StepPlan, Trace

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
    places = {"swap_host": "host", "swap_ssd": "ssd"}
    for tensor in trace["tensors"]:
        tier = places.get(plan["units"][tensor["unit"]]["activation"])
        if tier is None:
            continue
        for use in range(tensor["born"], min(tensor["last_used"] + 1, uses)):
            held[tier][use] += tensor["bytes"]
    return held


def moments(trace: Trace | None, record: StepRecord | None) -> list[Moment]:
    """The uses of a step: as measured, where they are those of the trace or there is no trace; else
    as traced, one after the other without waits."""
    if record is not None and record.uses:
        seen = [(use.unit, use.backward) for use in record.uses]
        if trace is None or seen == [(use["unit"], use["backward"]) for use in trace["uses"]]:
            return [
                (use.unit, use.backward, use.entered - record.begin, use.left - record.begin)
                for use in record.uses
            ]
    result = []
    at = 0.0
    for use in trace["uses"] if trace else []:
        at += use["gap_seconds"]
        result.append((use["unit"], use["backward"], at, at + use["seconds"]))
        at += use["seconds"]
    return result
