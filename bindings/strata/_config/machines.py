"""Machines whose ranks train one model, of which each machine holds all: they add up gradients.

    machines = Machines(machine, names, group, store, prefix)
    machines.watch(session)                              # which fails, or trains
    machines.meet()                                      # the core calls these three: see Column
    machines.gather(mine, size, all)
    machines.exchange(parts, size, mine)
    machines.close()

Note [Columns]. Ranks of one number, one on each machine, are a column, which has a group of Gloo of
its own. Its calls are made in an order that the layout of the model fixes, so all of them make the
same ones.

Note [Who is lost]. A machine may compute for as long as it likes: before each step's first call the
ranks of a column say in the store of torch.distributed that they have come, and wait for the
others. A thread of each says there every second that it lives. One that has not for LOST_S is lost,
and so is one whose bytes do not come in that time: all others raise StrataError, which names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .._errors import StrataError
from .threads import Thread

if TYPE_CHECKING:
    from .._core import Session

LOST_S = 10.0
BEAT_S = 1.0
PAUSE_MIN_S, PAUSE_MAX_S = 1e-4, 1e-2

log = logging.getLogger("strata")


class Machines:
    """As one rank sees them. Threads: one caller at a time; and one of its own, which beats."""

    def __init__(
        self, machine: int, names: Sequence[str], group: Any, store: Any, prefix: str
    ) -> None:
        """`machine`: this one's number; `names`: of all; `group`: of the column, in their order;
        `store`: torch's, where `prefix` is the column's own."""
        self.machine, self.names = machine, tuple(names)
        self._group = group
        # Connections of their own, where they have any: threads would wait for each other's.
        own, beats = (store.clone() if hasattr(store, "clone") else store for _ in range(2))
        self._store = distributed.PrefixStore(prefix, own)
        self._beats = distributed.PrefixStore(prefix, beats)
        self._session: Session | None = None
        self._meetings = 0
        self._ends = threading.Event()
        self._thread = Thread(target=self._beat, name="strata-beat", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)

    def gather(self, mine: int, size: int, everything: int) -> None:
        """`mine`: the address of so many bytes; `everything`: of as many for each machine."""
        parts = list(_bytes(everything, size * self.count).split(size)) if size else []
        if parts:
            self._complete(lambda: self._group.allgather([parts], [_bytes(mine, size)]))

    def exchange(self, parts: int, size: int, mine: int) -> None:
        """`parts` and `mine`: addresses of so many bytes; part m goes to machine m."""
        there, here = _bytes(parts, size), _bytes(mine, size)
        self._complete(lambda: self._group.alltoall_base(here, there, [], []))

    def watch(self, session: Session) -> None:
        """Others hear of its failure."""
        self._session = session

    def close(self) -> None:
        """This rank trains no more."""
        self._ends.set()
        self._thread.join()

    def _complete(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait(timedelta(seconds=LOST_S))
        except RuntimeError as error:
            self._refuse_lost(str(error).splitlines()[0])

    def meet(self) -> None:
        """Returns when all machines have called it: see Note [Who is lost]."""
        self._meetings += 1
        key, missing = f"meeting/{self._meetings}", set(range(self.count)) - {self.machine}
        seen: dict[int, tuple[str, float]] = {}
        pause = PAUSE_MIN_S
        try:
            self._store.set(f"{key}/{self.machine}", "")
            if self._meetings > 2:  # all have left that one
                self._store.delete_key(f"meeting/{self._meetings - 2}/{self.machine}")
            while missing := {m for m in missing if not self._store.check([f"{key}/{m}"])}:
                self._look(missing, seen)
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX_S)
        except RuntimeError as error:
            if isinstance(error, StrataError):
                raise
            raise StrataError(
                f"the store of torch.distributed cannot be reached any more "
                f"({str(error).splitlines()[0]:.200}): the machine that serves it, {self.names[0]} "
                "as a rule, has ended, or the network has"
            ) from error

    def _look(self, missing: set[int], seen: dict[int, tuple[str, float]]) -> None:
        """Raises StrataError for one of them that is lost, or has ended its training."""
        now = time.monotonic()
        for machine in missing:
            if self._store.check([f"left/{machine}"]):
                raise StrataError(
                    f"machine {self.names[machine]} has ended its training, and this one has not: "
                    "all ranks must take the same steps, or the output of its ranks says why"
                )
            beat = f"beat/{machine}"
            said = self._store.get(beat).decode() if self._store.check([beat]) else ""
            if seen.get(machine, ("", 0.0))[0] != said or machine not in seen:
                seen[machine] = (said, now)
            elif now - seen[machine][1] > LOST_S:
                self._refuse_lost(f"silent for {LOST_S:.0f} s", machine)

    def _refuse_lost(self, why: str, machine: int | None = None) -> None:
        others = [name for number, name in enumerate(self.names) if number != self.machine]
        who = self.names[machine] if machine is not None else " or ".join(others)
        raise StrataError(
            f"machine {who} is lost ({why:.200}): the output of its ranks says why; start again "
            "from the newest checkpoint"
        )

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
            while not self._ends.wait(BEAT_S) and not self._failed():
                beats += 1
                self._beats.set(f"beat/{self.machine}", str(beats))
            self._beats.set(f"left/{self.machine}", "")

    def _failed(self) -> bool:
        try:
            if self._session is not None:
                self._session.awaited_rank()
        except StrataError:
            return True
        return False


def _bytes(address: int, size: int) -> torch.Tensor:
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
