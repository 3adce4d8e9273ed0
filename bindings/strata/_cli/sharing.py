"""A step of one of several ranks on paper: what it has of the machine, and what it holds of the
model. For `strata plan` and `strata estimate` with --ranks.

    budgets = share_of({"device": ..., "host": ..., "ssd": ...}, ranks)
    costs = costs_of_rank(machine.costs, ranks, "host", given=[])
    trace = shared_among(trace, ranks, machines)       # for the rank that holds most

Every rank has a device of its own. Host memory, SSD and the processors are the machine's, and each
rank gets an equal part, as with strata.wrap().
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from .._config.choices import HOST
from .._planning.network import trained_bytes

if TYPE_CHECKING:
    from .._core import Costs, Plan, Trace, TracedUnit

# What all ranks of a machine share, whatever their devices are ...
SHARED = ("read_bytes_s", "write_bytes_s", "update_elements_s")
# ... and where the device is host memory.
SHARED_ON_HOST = ("upload_bytes_s", "download_bytes_s", "decode_bytes_s")


def share_of(memory: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Budgets of one rank, of those that were given."""
    return {tier: size if tier == "device" else size // ranks for tier, size in memory.items()}


def costs_of_rank(costs: Costs, ranks: int, device: str, given: Collection[str]) -> Costs:
    """The machine's, as one of its ranks finds them while all are at work. `given`: what was told,
    and not measured; links that were told are each rank's."""
    names = [*SHARED, *(n for n in SHARED_ON_HOST if device == HOST and n not in given)]
    return costs.replace(**{name: getattr(costs, name) / ranks for name in names})


def held_bytes(plan: Plan) -> int:
    """What a rank holds of all units, in whole pages."""
    return sum(
        unit["param_bytes"] + unit["state_bytes"] + unit["landing_bytes"]
        - unit["remote_param_bytes"] - unit["remote_state_bytes"] - unit["remote_landing_bytes"]
        for unit in plan["units"]
    )  # fmt: skip


def shared_among(trace: Trace, ranks: int, machines: int = 1) -> Trace:
    """A recorded step, for the rank that would hold most. Chunks are shared out as strata.wrap()
    does: the part of a unit that a rank lacks, it gets of the next ones. Here all chunks of a unit
    count alike, also a last one that is not full. Each machine has all that is frozen."""
    if ranks == 1:
        return trace
    half = any(4 * unit.elements > unit.param_bytes for unit in trace.units)  # 16 bits each
    trace = trace.replace(units=[_summed(unit) if half else unit for unit in trace.units])
    held: list[list[int]] = []  # by unit and rank: chunks
    left = [0] * ranks  # chunks times `ranks` that a rank may still take
    for unit in trace.units:
        left = [share + unit.chunks for share in left]
        taken, taker = [0] * ranks, 0
        for _ in range(unit.chunks):
            lacking = (r for r in range(taker, ranks) if 2 * left[r] >= ranks)
            most = max(range(taker, ranks), key=lambda r: left[r])
            taker = next(lacking, most)
            left[taker] -= ranks
            taken[taker] += 1
        held.append(taken)
    fullest = max(
        range(ranks),
        key=lambda r: sum(
            _bytes(unit) * chunks[r] // max(1, unit.chunks)
            for unit, chunks in zip(trace.units, held, strict=True)
        ),
    )
    units = [
        _held_in_part(unit, taken[fullest], ranks // machines)
        for unit, taken in zip(trace.units, held, strict=True)
    ]
    return trace.replace(units=units)


def _bytes(unit: TracedUnit) -> int:
    return unit.param_bytes + unit.grad_bytes + unit.state_bytes


def _summed(unit: TracedUnit) -> TracedUnit:
    """Ranks add up gradients in float32, which take twice what those in 16 bits do."""
    if unit.grad_bytes > unit.param_bytes:  # recorded with gradient_accumulation_steps
        return unit
    return unit.replace(grad_bytes=2 * unit.grad_bytes)


def _held_in_part(unit: TracedUnit, chunks: int, here: int) -> TracedUnit:
    """The unit, of which a rank holds so many chunks that train. `here`: ranks of a machine, which
    share what is frozen of it."""
    rests = unit.code_bytes or unit.param_bytes
    frozen = max(0, rests - trained_bytes(unit))

    def others(size: int) -> int:
        page = size // unit.chunks if unit.chunks else 0
        return size - chunks * page

    def params(size: int) -> int:
        of_all = size * frozen // max(1, rests)
        return others(size - of_all) + of_all - of_all // here

    return unit.replace(
        remote_elements=params(unit.elements),
        remote_param_bytes=params(rests),
        remote_grad_bytes=others(unit.grad_bytes),
        remote_state_bytes=others(unit.state_bytes),
    )
