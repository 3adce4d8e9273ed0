"""What ranks of several machines say to each other, over process groups of torch.distributed.

    wire = Wire(rank, machines, run)       # every rank makes it, at the same moment
    session = Session(config, foreign, wire)
    wire.close()                           # behind the session's end

Note [Groups of its own]. The core calls from threads of its own, two for each rank of another
machine, at moments that differ from rank to rank. What is sent from one rank to another one keeps
its order, and nothing else needs one; so only point-to-point calls are made, in groups that nobody
else uses. The user's own collectives, in theirs, are never between them. Where one call of a group
runs out of time, Gloo ends all its connections; so no two ranks share one with a third, and a rank
that is lost takes no other one with it. Pages rest in host memory: groups are of Gloo, whatever the
user's is.

Note [Both ways]. Two ranks have a group for each way: while Gloo waits for room in a connection
that it sends by, it reads nothing from it. So one connection carries, each way, half of what the
network does.

Note [Trailers]. Where a connection breaks, Gloo wakes whoever waits for a message of which nothing
has come, and forgets whoever waits for the rest of one: that receive would end by its patience. So
a byte follows each piece, and is waited for in its place: where it has come, the piece has, and
where the connection breaks within the piece nothing of it has.

Note [Expecting]. Gloo sends nothing that the other end has not asked for. So what is expected is
asked for at once, and waited for later. Who drops a call of Gloo's waits until nobody writes to its
memory. What comes for it later is written nowhere; the group is of no use then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .._errors import StrataError
from .._torch_compat import default_store

CONNECT = timedelta(seconds=60)

Places = Sequence[tuple[int, int]]
"""Addresses, and how many bytes are there."""


class Wire:
    """Threads: any; from a rank, and to it, one at a time."""

    def __init__(self, rank: int, machines: Sequence[str], run: str) -> None:
        """`machines`: by rank; `run`: a name that no other run has. Raises StrataError where a rank
        of another machine does not come, or cannot be reached."""
        self.sent: dict[int, int] = {}  # by rank: bytes
        # By rank: groups of Gloo, of which the sender is the first. See Note [Both ways].
        self._there: dict[int, Any] = {}
        self._here: dict[int, Any] = {}
        # All ranks make theirs in the order of both: each waits for the other one.
        for other in range(len(machines)):
            if machines[other] == machines[rank]:
                continue
            for source, to in sorted([(rank, other), (other, rank)]):
                store = distributed.PrefixStore(f"strata/{run}/{source}-{to}", default_store())
                try:
                    group = distributed.ProcessGroupGloo(store, int(rank == to), 2, CONNECT)
                except RuntimeError as error:
                    raise StrataError(_unreached(other, machines, rank, error)) from error
                (self._there if source == rank else self._here)[other] = group

    def close(self) -> None:
        """Nothing is sent any more."""
        self._there.clear()
        self._here.clear()

    def send(self, to: int, places: Places, patience: float) -> None:
        """Returns when the bytes may be written again. Raises ConnectionError where the other rank
        is gone, or takes nothing for so many seconds."""
        with _plain_errors():
            group = self._there[to]
            pieces = [
                (_view(*place), _trailer()) for place in places
            ]  # they stay until all are out
            works = [group.send([tensor], 1, 0) for piece in pieces for tensor in piece]
            for trailer in works[1::2]:  # behind its piece
                trailer.wait(timedelta(seconds=patience))
        self.sent[to] = self.sent.get(to, 0) + sum(size for _, size in places)

    def expect(self, source: int, places: Places) -> Arrival:
        """Returns at once. See Note [Expecting]."""
        return Arrival(self._here[source], places)


class Arrival:
    """Threads: one at a time."""

    def __init__(self, group: Any, places: Places) -> None:
        self._pieces = [(_view(*place), _trailer()) for place in places]
        self._works: list[Any] = []  # of each piece, and of its trailer
        self._broken: RuntimeError | None = None  # the group was: told behind what came before
        try:
            for piece in self._pieces:
                self._works += [group.recv([tensor], 0, 0) for tensor in piece]
        except RuntimeError as error:
            self._broken = error.with_traceback(None)  # which would keep the group

    def wait(self, patience: float) -> None:
        """Returns when all bytes are there. Raises ConnectionError where the other rank is gone, or
        says nothing for so many seconds."""
        with _plain_errors():
            if self._broken is not None:
                raise self._broken
            for trailer in self._works[1::2]:
                trailer.wait(timedelta(seconds=patience))

    def drop(self) -> None:
        """From here on nothing is written there."""
        self._works.clear()


def _unreached(other: int, machines: Sequence[str], rank: int, error: RuntimeError) -> str:
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    over = (
        f"the interface {chosen} (GLOO_SOCKET_IFNAME)"
        if chosen
        else f"the interface that the name {socket.gethostname()} leads to; GLOO_SOCKET_IFNAME in "
        "the environment of a machine's ranks chooses another one"
    )
    return (
        f"rank {other}, on {machines[other]}, did not come to train with rank {rank}, on "
        f"{machines[rank]}, or cannot be reached: its own output says which. This one waited at "
        f"{over} ({str(error).splitlines()[0]:.200})"
    )


def _trailer() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


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
