"""The ranks that train together, on one machine or several, as torch.distributed has started them.

    ranks = find_ranks()                  # None: this process is alone
    ranks.machines                        # by rank: the name of its machine; none: all are of one
    ranks.folder                          # where those of a machine meet, of this user alone
    ranks.wire                            # to those of other machines
    ranks.share(tensor)                   # what rank 0 has
    ranks.least(free_bytes)               # the smallest of what they have
    ranks.wait()                          # for all of them
    ranks.close()
    ranks_on_paper()                      # the same for a plan: asks nobody, any rank alone may
    plans_of_all(config, make_plan)       # what every rank would plan, without asking

All calls of a Ranks that was found are calls that every rank makes, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from .._errors import StrataError
from .wire import Wire, make_group

if TYPE_CHECKING:
    from .._core import Config, Plan
    from .._core import Ranks as RanksSpec

SAID_BYTES_MAX = 8192
TIMEOUT_S = 60.0
PATIENCE_S = 10.0  # with a rank of another machine that says nothing

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Ranks:
    """This process among them."""

    rank: int
    count: int
    folder: str  # none: on paper
    machines: tuple[str, ...] = ()  # none: all are of one
    wire: Wire | None = None  # none: likewise, or on paper

    def spec(self) -> RanksSpec:
        """As the core takes it."""
        return {
            "rank": self.rank,
            "count": self.count,
            "machines": list(self.machines),
            "patience_s": PATIENCE_S,
            "folder": self.folder,
            "timeout_s": TIMEOUT_S,
            "sums": False,
        }

    @property
    def together(self) -> int:
        """The most ranks that a machine has: all share out what theirs has alike."""
        return max(Counter(self.machines).values(), default=self.count)

    def share(self, tensor: torch.Tensor) -> None:
        """Gives every rank the values of rank 0, in place."""
        values = tensor.detach().contiguous()
        distributed.broadcast(values.view(-1).view(torch.uint8), 0)
        if values.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(values)

    def least(self, number: int) -> int:
        """The smallest number that a rank has; on paper this one's."""
        if not self.folder:
            return number
        all_of = torch.tensor([number], dtype=torch.int64)
        distributed.all_reduce(all_of, op=distributed.ReduceOp.MIN)
        return int(all_of)

    def wait(self) -> None:
        """Returns when all have come here."""
        distributed.barrier()

    def close(self) -> None:
        """The folder is not needed any more."""
        if _first_here(self.rank, self.machines):
            shutil.rmtree(self.folder, ignore_errors=True)


def ranks_on_paper() -> Ranks | None:
    """The ranks of torch.distributed, if there is more than one, without a word to the others."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    count = distributed.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))  # as torchrun says
    several = here < count and count % here == 0
    machines = tuple(f"machine-{rank // here}" for rank in range(count)) if several else ()
    return Ranks(distributed.get_rank(), count, "", machines) if count > 1 else None


def plans_of_all(config: Config, make_plan: Callable[[Config], Plan]) -> list[Plan]:
    """By rank; of a process that is alone the one. The same on every rank whose budgets are.

    Raises StrataError where the budgets of any of them cannot work.
    """
    if "ranks" not in config:
        return [make_plan(config)]
    here = config["ranks"]
    found = []
    for rank in range(here["count"]):
        there: RanksSpec = {**here, "rank": rank}
        try:
            found.append(make_plan({**config, "ranks": there}))
        except StrataError as error:
            share = f"one of {max(Counter(here['machines']).values(), default=here['count'])} "
            share += "shares of the machine's budgets"
            error.args = (f"{error} (rank {rank}: its host and ssd are {share})",)
            raise
    return found


def find_ranks() -> Ranks | None:
    """The ranks of torch.distributed, if there is more than one.

    Raises:
        ValueError: torch.distributed is still to be initialised.
        RuntimeError: ranks of one machine cannot reach those of another.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    there = distributed.is_available() and distributed.is_initialized()
    if not there:
        if started > 1:
            raise ValueError(
                f"{started} processes were started, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group('gloo') before strata.wrap()"
            )
        return None
    found = ranks_on_paper()
    if found is None:
        return None
    machines = _machines(found.count)
    wire = Wire(make_group()) if machines else None
    first = _first_here(found.rank, machines)
    folders = _all_say(_meeting_folder() if first else "", found.count)
    folder = next(
        of
        for rank, of in enumerate(folders)
        if _first_here(rank, machines) and (not machines or machines[rank] == machines[found.rank])
    )
    if machines:
        log.info(
            "ranks of %d machines, which do not share memory: %s; pages and gradients go from one "
            "to another over torch.distributed (gloo)",
            len(set(machines)),
            ", ".join(f"rank {rank} on {name}" for rank, name in enumerate(machines)),
        )
    return replace(found, folder=folder, machines=machines, wire=wire)


def _first_here(rank: int, machines: Sequence[str]) -> bool:
    """Whether it is the first rank of its machine."""
    return rank == 0 if not machines else machines.index(machines[rank]) == rank


def _machines(count: int) -> tuple[str, ...]:
    """By rank: the name of its machine. None: all ranks can share memory, and are of one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    own = os.environ.get("STRATA_MACHINE", "")  # ranks of one host that are to count as of several
    here = f"{boot}{os.geteuid()}{os.readlink('/proc/self/ns/pid')}{own}"
    name = own or socket.gethostname()
    said = _all_say(json.dumps([name, hashlib.sha256(here.encode()).hexdigest()]), count)
    all_of = [tuple(json.loads(text)) for text in said]
    different = list(dict.fromkeys(all_of))
    if len(different) == 1:
        return ()
    # Containers of one host, and users, may have the same name.
    shown: dict[tuple[str, ...], str] = {}
    for one in different:
        others = sum(other[0] == one[0] for other in shown)
        shown[one] = f"{one[0]} ({others + 1})" if others else one[0]
    return tuple(shown[one] for one in all_of)


def _all_say(text: str, count: int) -> list[str]:
    """What each rank says, by rank."""
    raw = text.encode()
    if len(raw) > SAID_BYTES_MAX:
        raise ValueError(f"{text!r} is longer than {SAID_BYTES_MAX} bytes")
    mine = torch.zeros(SAID_BYTES_MAX, dtype=torch.uint8)
    mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    all_of = [torch.empty_like(mine) for _ in range(count)]
    distributed.all_gather(all_of, mine)
    return [bytes(said.tolist()).rstrip(b"\0").decode() for said in all_of]


def _meeting_folder() -> str:
    """Made for this run, with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    at = runtime if runtime and os.access(runtime, os.W_OK) else None
    return tempfile.mkdtemp(prefix="strata-ranks-", dir=at)
