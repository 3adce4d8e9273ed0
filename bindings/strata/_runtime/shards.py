"""The shards of one wrapped model: parameters that are DTensors elsewhere (see sharding.py). While
a module runs it finds the DTensor, and at any other time the shard.

    shards = Shards.of(state)         # None: no parameter of the model is one
    shards.show(indices)              # their module's forward begins
    shards.hide(indices)              # ... is over
    shards.add_up(squares)            # over the meshes: of all parameters

Note [Norms]. A shard's gradient is a part of one, so sums of squares are added over the dimensions
of the mesh that cut the parameter, in the order of its processes: all of them get the same bits.
What all have whole (Replicate, and plain parameters) counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._config.rank_group import Collectives, cpu_group, group_of
from .._config.ranks import naming_lost
from .._config.sharding import Sharding, dtensor_of, hollow

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

    from .wrapped import Wrapped


class Shards:
    """Those of one wrapped model."""

    def __init__(self, state: Wrapped, dtensors: dict[int, nn.Parameter]) -> None:
        """`dtensors`: the caller's, by parameter."""
        self._state = state
        self.dtensors = dtensors
        self.shardings = shardings = {i: Sharding.of(p) for i, p in dtensors.items()}  # type: ignore[arg-type]
        self._shown: dict[int, torch.Tensor] = {}
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {i: [] for i in shardings}
        index_of = {id(state.params[i]): i for i in shardings}
        for module in state.model.modules():
            for name, parameter in module._parameters.items():
                if (index := index_of.get(id(parameter))) is not None:
                    self._places[index].append((module._parameters, name))
        for index, sharding in shardings.items():
            if sharding.mesh.device_type != state.device.type:
                raise ValueError(
                    f"parameter {state.names[index]!r} is a DTensor of a mesh of "
                    f"{sharding.mesh.device_type!r}, and strata computes on {state.device}: pass "
                    "device=, or make the mesh for that"
                )
        # By mesh and dimension, in an order that all processes have: who adds up along it.
        self._groups: list[tuple[DeviceMesh, int, Collectives]] = []
        for mesh in dict.fromkeys(sharding.mesh for sharding in shardings.values()):
            for dim in range(mesh.ndim):
                group = group_of(mesh.get_group(dim))
                assert group is not None
                self._groups.append((mesh, dim, Collectives(cpu_group(group))))

    @staticmethod
    def of(state: Wrapped) -> Shards | None:
        """Those of a model; None: it has none. All processes of the meshes ask at the same time."""
        found = {i: d for i, p in enumerate(state.params) if (d := dtensor_of(p)) is not None}
        return Shards(state, found) if found else None

    def __contains__(self, index: int) -> bool:
        return index in self.shardings

    def shows(self, index: int, found: Any) -> bool:
        """Whether `found` stands for the parameter where its module looks."""
        return found is not None and self._shown.get(index) is found

    def whole(self, index: int, parameter: torch.Tensor) -> Any:
        """The DTensor of a parameter that is a shard; another one is whole."""
        sharding = self.shardings.get(index)
        if sharding is None:
            return parameter
        with torch.enable_grad():  # as a parameter is, whatever is recorded
            return sharding.whole(parameter)

    def show(self, indices: Iterable[int]) -> None:
        """From here on modules find DTensors. REQUIRES: these parameters are plain ones."""
        for index in indices:
            if index not in self.shardings or index in self._shown:
                continue
            whole = self.whole(index, self._state.params[index])
            whole._is_param = True
            self._shown[index] = whole
            for parameters, name in self._places[index]:
                parameters[name] = whole

    def hide(self, indices: Iterable[int]) -> None:
        """They find the shards. The second time it does nothing."""
        for index in indices:
            if index in self._shown:
                for parameters, name in self._places[index]:
                    parameters[name] = self._state.params[index]
                self._shown.pop(index, None)  # last: an interrupt may come ahead of it

    def hollow(self) -> None:
        """The caller's DTensors give up their memory: the values are in pages."""
        for dtensor in self.dtensors.values():
            hollow(dtensor)

    def agreed(self, number: float) -> float:
        """One that is not finite, where any process of the meshes has such a one; else the largest:
        what all have whole may differ, if only by a hook of somebody's."""
        for _, _, calls in self._groups:
            (found,) = _gather(calls, [number])
            number = max(found, key=lambda of: (not math.isfinite(of), of))
        return number

    def add_up(self, squares: Sequence[float]) -> list[float]:
        """What all processes of the meshes have together, of what this one has of each parameter.
        All of them call it, with as many. See Note [Norms]."""
        found = list(squares)
        for mesh, dim, calls in self._groups:
            cut = [i for i, s in self.shardings.items() if s.mesh == mesh and s.cuts(dim)]
            if not cut:
                continue
            for index, values in zip(cut, _gather(calls, [found[i] for i in cut]), strict=True):
                found[index] = sum(values)
        return found


def _gather(calls: Collectives, numbers: list[float]) -> list[list[float]]:
    """Of each number those of all processes, by rank."""
    with naming_lost(None, when=""):
        parts = calls.gather(torch.tensor(numbers, dtype=torch.float64))
    found: list[list[float]] = torch.stack(parts, dim=1).tolist()
    return found
