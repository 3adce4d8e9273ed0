"""Parameters that are DTensors of a tensor-parallel mesh. What this process has of one, its shard,
is the parameter that strata trains (shards.py has them while it does).

    check_sharded(model, options)     # ValueError: what cannot be trained by its shards
    take_shards(model, optimizer)     # parameters are shards from here on
    hollow(dtensor_of(parameter))     # their values are somewhere else now
    sharding = Sharding.of(dtensor)
    sharding.whole(shard)             # the DTensor
    sharding.cut(values)              # the shard of what all have whole
    give_back(model, optimizer, dtensors, values)     # parameters are DTensors again

Note [The same objects]. torch lets no DTensor become a plain parameter, so modules and optimizers
hold other objects meanwhile. The caller's are kept, without memory, and come back with the values.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from .._torch_compat import is_dtensor
from .choices import AS_IS, INIT
from .rank_group import group_of
from .update_modes import LockFree

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import DTensor

    from .options import Options

PLACEMENTS = ("Shard", "Replicate")  # under which every element is whole in some process


@dataclass(frozen=True, eq=False)
class Sharding:
    """How a DTensor is spread."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size  # of the whole
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: DTensor) -> Sharding:
        """That of a DTensor."""
        return Sharding(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def whole(self, shard: torch.Tensor) -> DTensor:
        """The DTensor of which this process has that shard. Autograd follows."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            shard,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """This process's shard of the whole, a view: as torch.chunk() cuts along each dimension of
        the mesh that does."""
        coordinates = self.mesh.get_coordinate()
        assert coordinates is not None
        for dim, placement in enumerate(self.placements):
            if self.cuts(dim):
                parts = values.chunk(self.mesh.size(dim), placement.dim)
                values = parts[coordinates[dim]]
        return values

    def cuts(self, dim: int) -> bool:
        """Whether processes along that dimension of the mesh have different elements."""
        return bool(self.placements[dim].is_shard())

    def said(self) -> str:
        """Which shard this process has: what ranks must have in common."""
        return f" {self.placements}, at {self.mesh.get_coordinate()} of {self.mesh.shape}"

    def members(self) -> set[int]:
        """The processes of the mesh."""
        return set(map(int, self.mesh.mesh.flatten()))


def dtensor_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The DTensor whose shard this parameter is; None: it is no shard. Ahead of strata.wrap()
    having moved it."""
    found: nn.Parameter | None = vars(parameter).get("_strata_dtensor")
    return found


def sharding_of(parameter: torch.Tensor) -> Sharding | None:
    """How that one is spread; likewise."""
    dtensor = dtensor_of(parameter)
    return None if dtensor is None else Sharding.of(dtensor)  # type: ignore[arg-type]


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a DTensor, without autograd."""
    whole: Any = tensor
    with torch.no_grad():
        shard: torch.Tensor = whole.to_local()
        return shard


def why_not_sharded(parameter: Any) -> str:
    """Why a parameter that is a DTensor cannot be trained by its shard; "": it can."""
    odd = [p for p in parameter.placements if type(p).__name__ not in PLACEMENTS]
    if odd:
        return (
            f"with {odd[0]!r}, and parameters may have Shard and Replicate alone: "
            "redistribute() it first"
        )
    if 0 in shard_of(parameter).shape:
        return (
            f"with {parameter.placements}, of which this process has no element: spread it over "
            "fewer processes, or have it whole in all of them (Replicate)"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "with hooks, which would be called with shards: register them behind strata.wrap()"
    return ""


def check_sharded(model: nn.Module, options: Options) -> None:
    """Raises ValueError for what a model cannot have whose parameters are DTensors."""
    shardings = _shardings(model)
    if not shardings:
        return
    name = next(iter(shardings))
    what = f"parameter {name!r} is a DTensor, and"
    if options.max_unit_norm is not None:
        raise ValueError(
            f"{what} max_unit_norm= would clip each shard by itself: pass max_grad_norm=, whose "
            "norm is that of all shards"
        )
    for asked in ("max_grad_norm", "skip_nonfinite"):
        if isinstance(options.update, LockFree) and getattr(options, asked):
            raise ValueError(
                f"{what} {asked}= needs the gradients of all its shards at step(), for which "
                f"{options.update!r} does not wait: pass update='on_step'"
            )
    if options.split is not None:
        raise ValueError(
            f"{what} split= is found out by trials, which may end differently in other processes: "
            "leave it out, and pass smaller batches"
        )
    if options.memory is None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"{what} processes of this machine share its memory: pass memory=, the part of each"
        )
    if options.frozen != AS_IS:
        raise ValueError(f"{what} frozen= takes whole parameters: leave it out")
    if options.weights == INIT:
        raise ValueError(
            f"{what} modules initialise whole parameters: read the weights from a file"
        )
    if trains_alone(model, options):
        return
    group = group_of(options.rank_group)
    together = set(group.members) if group is not None else set()
    for name, sharding in shardings.items():
        others = sorted(sharding.members() & together - {distributed.get_rank()})
        if others:
            raise ValueError(
                f"parameter {name!r} is a DTensor over this process and process {others[0]}, which "
                "would also train together as ranks: pass rank_group=, a group of processes that "
                "have the same shards, such as mesh['dp'] of a mesh of ('dp', 'tp')"
            )


def trains_alone(model: nn.Module, options: Options) -> bool:
    """Whether all processes there are share the parameters of the model, so that no two of them
    train as ranks."""
    if options.rank_group is not None:
        return False
    world = group_of(None)
    everyone = set(world.members) if world is not None else set()
    return any(of.members() == everyone for of in _shardings(model).values())


def _shardings(model: nn.Module) -> dict[str, Sharding]:
    """Of the parameters that are DTensors, by name."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: Sharding.of(p) for name, p in named if is_dtensor(p)}  # type: ignore[arg-type]


def take_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Where parameters are DTensors, modules and groups of the optimizer get their shards, which
    share the memory. REQUIRES: check_sharded()."""
    shards = {}
    for parameter in model.parameters():
        if is_dtensor(parameter):
            shard = nn.Parameter(shard_of(parameter).detach(), parameter.requires_grad)
            vars(shard).update({k: v for k, v in vars(parameter).items() if k != "_is_param"})
            vars(shard)["_strata_dtensor"] = parameter
            shards[id(parameter)] = shard
    if shards:
        _exchange(model, optimizer, shards)


def hollow(parameter: nn.Parameter) -> None:
    """A DTensor gives its memory up, as somebody else has its values."""
    sharding = Sharding.of(parameter)  # type: ignore[arg-type]
    nothing = torch.empty_like(shard_of(parameter), device="meta")
    with contextlib.suppress(RuntimeError):  # a graph or a weak reference has it: it stays
        torch.utils.swap_tensors(parameter, nn.Parameter(sharding.whole(nothing)))
    parameter.__class__ = _hollow_class()


@functools.cache
def _hollow_class() -> type:
    from torch.distributed.tensor import DTensor

    class HollowDTensor(DTensor):
        """One that was given to strata.wrap(), until strata.unwrap()."""

        __slots__ = ()

        @property
        def grad(self) -> torch.Tensor | None:  # type: ignore[override]
            """Raises RuntimeError: it would be None, and nobody would notice."""
            raise RuntimeError(
                "this parameter was given to strata.wrap(), and its shard trains in its place: ask "
                "model.parameters() for the parameters"
            )

    return HollowDTensor


def give_back(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtensors: Mapping[nn.Parameter, nn.Parameter],
    values: Mapping[nn.Parameter, torch.Tensor],
) -> None:
    """In the place of shards modules and groups get the DTensors that were there, by shard, with
    the shards' values."""
    from torch.distributed.tensor import DTensor

    found = {}
    for shard, dtensor in dtensors.items():
        dtensor.__class__ = DTensor  # type: ignore[assignment]
        whole = nn.Parameter(Sharding.of(dtensor).whole(values[shard]), shard.requires_grad)  # type: ignore[arg-type]
        vars(whole).update({k: v for k, v in vars(shard).items() if k != "_strata_dtensor"})
        try:
            torch.utils.swap_tensors(dtensor, whole)
        except RuntimeError:  # as in hollow()
            dtensor = whole
        found[id(shard)] = dtensor
    _exchange(model, optimizer, found)


def _exchange(
    model: nn.Module, optimizer: torch.optim.Optimizer, by_id: Mapping[int, nn.Parameter]
) -> None:
    """Puts others in the place of parameters."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = by_id.get(id(parameter), parameter)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return  # refused later
    for group in optimizer.param_groups:
        group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]
    state = optimizer.state
    if not isinstance(state, dict):
        return  # that of a wrapped model rests in pages
    for known in [p for p in state if id(p) in by_id]:
        entry = state.pop(known)
        state[by_id[id(known)]] = {
            name: shard_of(value) if is_dtensor(value) else value for name, value in entry.items()
        }
