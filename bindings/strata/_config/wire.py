"""What ranks of several machines say to each other, over a process group of torch.distributed.

    wire = Wire(make_group())              # every rank makes it, at the same moment
    session = Session(config, foreign, wire)

Note [A group of its own]. The core calls from threads of its own, two for each rank of another
machine, at moments that differ from rank to rank. What is sent from one rank to another one keeps
its order, and nothing else needs one; so only point-to-point calls are made, in a group that
nobody else uses. The user's own collectives, in theirs, are never between them. Pages rest in host
memory: the group is of Gloo, whatever the user's is.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch import distributed

Places = Sequence[tuple[int, int]]
"""Addresses, and how many bytes are there."""


def make_group() -> distributed.ProcessGroup:
    """A Gloo group of all ranks. Raises RuntimeError where one cannot reach another."""
    return distributed.new_group(backend="gloo")


class Wire:
    """Threads: any; from a rank, and to it, one at a time."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.sent: dict[int, int] = {}  # by rank: bytes

    def send(self, to: int, places: Places, patience: float) -> None:
        """Returns when the bytes may be written again. Raises ConnectionError where the other rank
        is gone, or takes nothing for so many seconds."""
        with _plain_errors():
            works = [self._group.send([_view(*place)], to, 0) for place in places]
            for work in works:
                work.wait(timedelta(seconds=patience))
        self.sent[to] = self.sent.get(to, 0) + sum(size for _, size in places)

    def receive(self, source: int, places: Places, patience: float) -> None:
        """Returns when all bytes are there. Raises ConnectionError likewise."""
        with _plain_errors():
            works = [self._group.recv([_view(*place)], source, 0) for place in places]
            for work in works:
                work.wait(timedelta(seconds=patience))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What Gloo says, without the place in its source and its advice."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise ConnectionError(re.sub(r"^\[\S*\] ", "", first).partition(". ")[0]) from None


def _view(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
