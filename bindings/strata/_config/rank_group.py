"""The processes that train one copy of a model: a group of torch.distributed.

    group = group_of(rank_group)               # what strata.wrap() was given; None: all processes
    group.rank, group.members                  # ranks are those within the group
    calls = Collectives(cpu_group(group))      # with tensors in CPU memory
    calls.exchange("text")                     # what all ranks say, by rank
    calls.broadcast(tensor, 0)                 # what rank 0 has
    calls.least(number)                        # the smallest number that a rank has
    meets_over_a_file()                        # which a process that is killed may spoil

Format. A text travels behind its length, padded to the longest one. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .._torch_compat import default_store

WAIT = timedelta(minutes=30)  # for other ranks: torch's own default

Complete = Callable[[Callable[[], "distributed.Work"]], None]
"""Begins a call of all ranks, and returns when it is over."""


@dataclass(frozen=True)
class Group:
    """Processes that train together."""

    rank: int  # this one's, within the group
    members: tuple[int, ...]  # by rank: which of all processes it is
    process_group: Any = None  # None: torch has none of just these


def group_of(rank_group: Any) -> Group | None:
    """The processes that rank_group= names, without a word to them. None: it names none, and
    torch.distributed is not initialised. A mesh of two dimensions, to replicate and to shard over,
    names all that are in it.

    Raises:
        TypeError: it is neither a process group nor a mesh.
        ValueError: it is a mesh of more dimensions; this process is not in it; or torch.distributed
            does not know it.
    """
    there = distributed.is_available() and distributed.is_initialized()
    if rank_group is None:
        return _known(distributed.group.WORLD) if there else None
    if distributed.is_available() and _is_of_others(rank_group):
        raise ValueError(
            "rank_group: this process is not in that group: let only its members call "
            "strata.wrap() with it, and give each other process the group that it is in"
        )
    kinds = (distributed.ProcessGroup, distributed.DeviceMesh) if distributed.is_available() else ()
    if not isinstance(rank_group, kinds):
        raise TypeError(
            "rank_group must be a process group, such as torch.distributed.new_group([0, 1]) "
            f"returns, a DeviceMesh of one dimension or two, or None, not {rank_group!r}"
        )
    if not there:
        raise ValueError(
            "rank_group was given, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group('gloo') and make the group before strata.wrap()"
        )
    if not isinstance(rank_group, distributed.DeviceMesh):
        return _known(rank_group)
    if rank_group.ndim == 1:
        return _known(rank_group.get_group())
    return _of_mesh(rank_group)


def meets_over_a_file() -> bool:
    """Whether processes found each other by torch's FileStore. A process that is killed while it
    writes leaves half a record, which the others never end reading."""
    store = default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return isinstance(store, distributed.FileStore)


def _is_of_others(rank_group: Any) -> bool:
    """Whether it is what torch has in place of a group that this process is not in."""
    if isinstance(rank_group, distributed.DeviceMesh):
        return rank_group.get_coordinate() is None
    return isinstance(rank_group, int) and rank_group == distributed.GroupMember.NON_GROUP_MEMBER


def _known(process_group: Any) -> Group:
    try:
        rank = distributed.get_rank(process_group)
    except ValueError:
        raise ValueError(
            "rank_group: torch.distributed does not know that group any more: make another one"
        ) from None
    return Group(rank, tuple(distributed.get_process_group_ranks(process_group)), process_group)


def _of_mesh(mesh: Any) -> Group:
    """Of one of several dimensions, along its last dimension first."""
    if mesh.ndim > 2:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"rank_group is a DeviceMesh of {mesh.ndim} dimensions"
            + (f" {tuple(names)}" if names else "")
            + ", and strata trains one model over one of them, or over two, to replicate and to "
            "shard over: pass "
            + (f"mesh[{names[-1]!r}], or mesh[{names[-2:]!r}]" if names else "a part of it")
        )
    members = tuple(map(int, mesh.mesh.flatten()))
    world = _known(distributed.group.WORLD)
    if members == world.members:
        return world
    return Group(members.index(distributed.get_rank()), members)


def cpu_group(group: Group) -> Any:
    """A process group of the same ranks, in the same order, that sends tensors in CPU memory:
    torch's, or, where that is for GPUs alone or there is none, one of Gloo. Its ranks ask at the
    same moment; other processes need not."""
    of = group.process_group
    name = f"mesh/{'-'.join(map(str, group.members))}"
    if of is not None:
        backends = distributed.get_backend_config(of)  # as "cpu:gloo,cuda:nccl"
        if "cpu" in {pair.partition(":")[0] for pair in backends.split(",")}:
            return of
        name = f"beside/{of.group_name}"
    store = distributed.PrefixStore(f"strata/{name}", default_store())
    size = len(group.members)
    # Each rank draws a number for each one that is made, and none is there before all have drawn.
    made = (store.add("drawn", 1) - 1) // size
    store = distributed.PrefixStore(str(made), store)
    return distributed.ProcessGroupGloo(store, group.rank, size, WAIT)


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
        lengths = self.gather(torch.tensor([raw.numel()], dtype=torch.int64))
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        found = zip(self.gather(padded), lengths, strict=True)
        return [value[: int(length)].numpy().tobytes().decode() for value, length in found]

    def broadcast(self, value: torch.Tensor, source: int) -> None:
        """Has all ranks have that of rank `source`, in place."""
        self._complete(lambda: self._group.broadcast(value, source))

    def least(self, number: int) -> int:
        """The smallest number that a rank has."""
        value = torch.tensor([number], dtype=torch.int64)
        self._complete(lambda: self._group.allreduce([value], distributed.ReduceOp.MIN))
        return int(value)

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks, by rank: of the same size."""
        values = [torch.empty_like(value) for _ in range(self._group.size())]
        self._complete(lambda: self._group.allgather([values], [value]))
        return values
