"""A step of one of several ranks on paper: what it has of the machine, and what it holds of the
model. For `strata plan` and `strata estimate` with --ranks.

    budgets = share_of({"device": ..., "host": ..., "ssd": ...}, ranks)
    costs = costs_of_rank(machine.costs, ranks, "host", given=[])
    trace = shared_among(trace, ranks)                 # for the rank that holds most

Every rank has a device of its own. Host memory, SSD and the processors are the machine's, and each
rank gets an equal part, as with strata.wrap().
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._config.choices import HOST

if TYPE_CHECKING:
    from .._core import Costs, Plan, Trace, TracedUnit

FLOAT32_BYTES = 4
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


def shared_among(trace: Trace, ranks: int) -> Trace:
    """A recorded step, for the rank that would hold most. Chunks are given out as strata.wrap()
    does: those that train by themselves, and so are those that are frozen. Here all chunks of a
    unit and kind count alike, also a last one that is not full."""
    if ranks == 1:
        return trace
    half = any(4 * unit.elements > unit.param_bytes for unit in trace.units)  # 16 bits each
    units = [_Unit.of(_summed(unit) if half else unit) for unit in trace.units]
    trained = _given_out([unit.trained for unit in units], ranks)
    frozen = _given_out([unit.frozen for unit in units], ranks)

    def lacking(rank: int) -> list[dict[str, int]]:
        return [
            unit.lacks(train[rank], rest[rank])
            for unit, train, rest in zip(units, trained, frozen, strict=True)
        ]

    least = min(map(lacking, range(ranks)), key=lambda of: sum(map(_bytes, of)))
    return trace.replace(
        units=[unit.whole.replace(**lacks) for unit, lacks in zip(units, least, strict=True)]
    )


def _given_out(chunks: Sequence[int], takers: int) -> list[list[int]]:
    """Of so many chunks by unit, those of each taker, by unit: the part of a unit that one lacks,
    it gets of the next ones."""
    given = []
    left = [0] * takers  # chunks times `takers` that one may still take
    for count in chunks:
        left = [its + count for its in left]
        taken, taker = [0] * takers, 0
        for _ in range(count):
            lacking = (of for of in range(taker, takers) if 2 * left[of] >= takers)
            most = max(range(taker, takers), key=lambda of: left[of])
            taker = next(lacking, most)
            left[taker] -= takers
            taken[taker] += 1
        given.append(taken)
    return given


@dataclass(frozen=True)
class _Unit:
    """Its chunks of either kind."""

    whole: TracedUnit
    trained: int
    frozen: int

    @staticmethod
    def of(unit: TracedUnit) -> _Unit:
        """As many of each kind as it has bytes of it; one at least where it has any."""
        trains, rests = _trained_bytes(unit), _rests(unit)
        if trains >= rests:
            return _Unit(unit, unit.chunks, 0)
        least = 1 if trains else 0
        trained = max(least, min(round(unit.chunks * trains / rests), unit.chunks - 1))
        return _Unit(unit, trained, unit.chunks - trained)

    def lacks(self, trained: int, frozen: int) -> dict[str, int]:
        """What a rank has not that holds so many of its chunks, by what TracedUnit calls it."""
        unit, rests = self.whole, _rests(self.whole)
        trains = min(_trained_bytes(unit), rests)

        def of_trained(size: int) -> int:
            return size - trained * (size // max(1, self.trained))

        def of_frozen(size: int) -> int:
            return size - frozen * (size // max(1, self.frozen))

        def of_both(size: int) -> int:
            part = size * trains // max(1, rests)
            return of_trained(part) + of_frozen(size - part)

        return {
            "remote_elements": of_both(unit.elements),
            "remote_param_bytes": of_both(rests),
            "remote_grad_bytes": of_trained(unit.grad_bytes),
            "remote_state_bytes": of_trained(unit.state_bytes),
        }


def _trained_bytes(unit: TracedUnit) -> int:
    """The most bytes of its parameters that train. REQUIRES: gradients in float32, as of ranks."""
    elements = min(unit.elements, unit.grad_bytes // FLOAT32_BYTES)
    return unit.param_bytes * elements // max(1, unit.elements)


def _rests(unit: TracedUnit) -> int:
    return unit.code_bytes or unit.param_bytes


def _bytes(lacks: Mapping[str, int]) -> int:
    return sum(lacks[f"remote_{of}_bytes"] for of in ("param", "grad", "state"))


def _summed(unit: TracedUnit) -> TracedUnit:
    """Ranks add up gradients in float32, which take twice what those in 16 bits do."""
    if unit.grad_bytes > unit.param_bytes:  # recorded with gradient_accumulation_steps
        return unit
    return unit.replace(grad_bytes=2 * unit.grad_bytes)
