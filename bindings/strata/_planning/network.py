"""What machines send each other in a step, on paper.

    crossing = crossing_of(trace, plan.resident, Network(machines=2, ranks=8, bytes_s=50e9))
    crossing.bytes          # that a machine gets; it sends as many
    crossing.seconds        # on its link; a step takes no less

A machine gets what others hold of a unit once for each use of it, however many ranks it has: one
of them relays it. What stays on the devices, or where it was relayed, comes once, for it is updated
between two steps: of a pass back and forth, relays keep as much as they have room for. Each rank's
gradient goes to who holds the unit, once, in the dtype of computation; under rank_sums="machines"
each machine's sum does, in float32. Pages come ahead of their use and gradients leave beside the
backward, so a step takes the longer of the two, the step without a network and the network.

What is frozen each machine has, and none of it crosses. A trace does not tell how much of a unit
trains: as many elements as its gradients have, at most. Under rank_gathers="int8" what trains comes
as codes, but for units of which something is frozen, which count as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._core import Trace, TracedUnit


FLOAT32_BYTES = 4
CODED_BYTES = 1 + 4 / 64  # of an element: a byte, and a float32 for each block of 64


@dataclass(frozen=True)
class Network:
    """Machines alike, with as many ranks each."""

    machines: int
    ranks: int  # of all machines
    bytes_s: float  # of the link of a machine, each way
    rank_gathers: str = "exact"  # as strata.wrap() takes it, ...
    rank_sums: str = "ranks"  # ... and this
    relay_bytes: int = 0  # of a machine: what pages of others have of its host memory


@dataclass(frozen=True)
class Crossing:
    """Of a step, in each direction of a machine's link."""

    network: Network
    bytes: int
    bytes_min: int  # where a machine got once what changes, and sent one sum of its gradients

    @property
    def seconds(self) -> float:
        """That the link is busy."""
        return self.bytes / self.network.bytes_s

    @property
    def seconds_min(self) -> float:
        """That no way of sharing parameters out can do without."""
        return self.bytes_min / self.network.bytes_s


def trained_bytes(unit: TracedUnit) -> int:
    """The most bytes of its parameters that train. REQUIRES: gradients in float32, as of ranks."""
    elements = min(unit.elements, unit.grad_bytes // FLOAT32_BYTES)
    return unit.param_bytes * elements // max(1, unit.elements)


def crossing_of(trace: Trace, resident: Sequence[bool], network: Network) -> Crossing:
    """Of a step whose plan says which units stay on the device. `trace`: of one rank of several."""
    uses = Counter(use.unit for use in trace.uses)
    here = network.ranks // network.machines
    comes = again = passing = sent = least = 0
    for number, unit in enumerate(trace.units):
        trained = crosses = trained_bytes(unit)
        if network.rank_gathers == "int8" and trained == unit.param_bytes:
            crosses = min(crosses, round(unit.elements * CODED_BYTES))
        if resident[number]:
            comes += crosses
        else:
            comes += min(uses[number], 1) * crosses
            again += max(uses[number] - 1, 0) * crosses
            passing += trained
        if network.rank_sums == "machines" and here > 1:
            sent += min(FLOAT32_BYTES * unit.elements, unit.grad_bytes)
        else:
            sent += here * trained
        least += crosses + trained
    # All chunks are shared out over all ranks alike.
    away = (network.machines - 1) / network.machines
    kept = min(1.0, network.relay_bytes / (passing * away)) if passing else 1.0
    comes += round((1 - kept) * again)
    return Crossing(network, round((comes + sent) * away), round(least * away))
