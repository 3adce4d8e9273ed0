"""The processes that train one copy of a model: a group of torch.distributed.

    group = group_of(rank_group)               # what strata.wrap() was given; None: all processes
    group.rank(), group.size()                 # ranks are those within the group
    calls = Collectives(cpu_group(group))      # with tensors in CPU memory
    calls.exchange("text")                     # what all ranks say, by rank
    calls.broadcast(tensor, 0)                 # what rank 0 has
    calls.least(number)                        # the smallest number that a rank has

Format. A text travels behind its length, padded to the longest one. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .._torch_compat import default_store

WAIT = timedelta(minutes=30)  # for other ranks: torch's own default

Complete = Callable[[Callable[[], "distributed.Work"]], None]
"""Begins a call of all ranks, and returns when it is over."""


def group_of(rank_group: Any) -> Any:
    """The process group that rank_group= names. None: it names none, and torch.distributed is not
    initialised.

    Raises:
        TypeError: it is neither a process group nor a mesh.
        ValueError: it is a mesh of several dimensions; this process is not in it; or
            torch.distributed does not know it.
    """
    there = distributed.is_available() and distributed.is_initialized()
    if rank_group is None:
        return distributed.group.WORLD if there else None
    if distributed.is_available() and _is_of_others(rank_group):
        raise ValueError(
            "rank_group: this process is not in that group: let only its members call "
            "strata.wrap() with it, and give each other process the group that it is in"
        )
    kinds = (distributed.ProcessGroup, distributed.DeviceMesh) if distributed.is_available() else ()
    if not isinstance(rank_group, kinds):
        raise TypeError(
            "rank_group must be a process group, such as torch.distributed.new_group([0, 1]) "
            f"returns, a DeviceMesh of one dimension, or None, not {rank_group!r}"
        )
    if not there:
        raise ValueError(
            "rank_group was given, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group('gloo') and make the group before strata.wrap()"
        )
    group = _of_mesh(rank_group) if isinstance(rank_group, distributed.DeviceMesh) else rank_group
    try:
        distributed.get_rank(group)
    except ValueError:
        raise ValueError(
            "rank_group: torch.distributed does not know that group any more: make another one"
        ) from None
    return group


def _is_of_others(rank_group: Any) -> bool:
    """Whether it is what torch has in place of a group that this process is not in."""
    if isinstance(rank_group, distributed.DeviceMesh):
        return rank_group.ndim == 1 and rank_group.get_coordinate() is None
    return isinstance(rank_group, int) and rank_group == distributed.GroupMember.NON_GROUP_MEMBER


def _of_mesh(mesh: Any) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names
    raise ValueError(
        f"rank_group is a DeviceMesh of {mesh.ndim} dimensions"
        + (f" {tuple(names)}" if names else "")
        + ", and strata trains one copy over one dimension: pass "
        + (" or ".join(f"mesh[{name!r}]" for name in names) if names else "mesh['dim'] of one")
        + (". " if names else " that has mesh_dim_names=. ")
        + "Copies that train together over a second dimension (replicate and shard) are not built"
    )


def cpu_group(group: Any) -> Any:
    """One of the same ranks, in the same order, that sends tensors in CPU memory: the group itself,
    or, where that is for GPUs alone, one of Gloo. Its ranks ask at the same moment; other processes
    need not."""
    backends = distributed.get_backend_config(group)  # as "cpu:gloo,cuda:nccl"
    if "cpu" in {pair.partition(":")[0] for pair in backends.split(",")}:
        return group
    store = distributed.PrefixStore(f"strata/beside/{group.group_name}", default_store())
    # Each rank draws a number for each one that is made, and none is there before all have drawn.
    made = (store.add("drawn", 1) - 1) // group.size()
    store = distributed.PrefixStore(str(made), store)
    return distributed.ProcessGroupGloo(store, group.rank(), group.size(), WAIT)


def _complete(begin: Callable[[], distributed.Work]) -> None:
    begin().wait()


class Collectives:
    """Calls that all ranks of a group make, in the same order. Threads: one at a time."""

    def __init__(self, group: Any, complete: Complete = _complete) -> None:
        """`group`: of cpu_group(); `complete`: how this rank waits."""
        self._group, self._complete = group, complete

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([raw.numel()], dtype=torch.int64))
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        found = zip(self._gather(padded), lengths, strict=True)
        return [value[: int(length)].numpy().tobytes().decode() for value, length in found]

    def broadcast(self, value: torch.Tensor, source: int) -> None:
        """Has all ranks have that of rank `source`, in place."""
        self._complete(lambda: self._group.broadcast(value, source))

    def least(self, number: int) -> int:
        """The smallest number that a rank has."""
        value = torch.tensor([number], dtype=torch.int64)
        self._complete(lambda: self._group.allreduce([value], distributed.ReduceOp.MIN))
        return int(value)

    def _gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks, by rank: of the same size."""
        values = [torch.empty_like(value) for _ in range(self._group.size())]
        self._complete(lambda: self._group.allgather([values], [value]))
        return values
