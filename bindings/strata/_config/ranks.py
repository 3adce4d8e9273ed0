"""The ranks of one machine that train together, as torch.distributed has started them.

    ranks = find_ranks()                  # None: this process is alone
    ranks.folder                          # where they meet, of this user alone; the same for all
    ranks.share(tensor)                   # what rank 0 has; share_text(text), too
    ranks.least(free_bytes)               # the smallest of what they have
    ranks.wait()                          # for all of them
    ranks.close()
    with naming_lost(ranks): ...          # who has ended is named, where torch only lost it
    ranks_on_paper()                      # the same for a plan: asks nobody, any rank alone may
    plans_of_all(config, make_plan)       # what every rank would plan, without asking
    plans_of_one_page_size(config, make_plan)

All calls of a Ranks that was found are calls that every rank makes, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from .._errors import StrataError
from .launched import processes_started

if TYPE_CHECKING:
    from .._core import Config, Plan
    from .._core import Ranks as RanksSpec

TIMEOUT_S = 60.0
TIMEOUT_MAX_S = 1e9
RANK_GRADIENTS = ("mean", "sum")
LOST = re.compile(r"gloo|Connection (closed|reset)|Broken pipe")  # what torch says then
ENDED_S = 1.0  # a connection is lost ahead of the process that had it


@dataclass(frozen=True)
class Ranks:
    """This process among them."""

    rank: int
    count: int
    folder: str  # none: on paper
    pids: tuple[int, ...] = ()  # by rank; none: on paper

    def spec(self, gradients: str) -> RanksSpec:
        """As the core takes it. `gradients`: one of RANK_GRADIENTS."""
        return {
            "rank": self.rank,
            "count": self.count,
            "folder": self.folder,
            "pids": list(self.pids),
            "timeout_s": TIMEOUT_S,
            "sums": gradients == "sum",
        }

    def share(self, tensor: torch.Tensor) -> None:
        """Gives every rank the values of rank 0, in place."""
        values = tensor.detach().contiguous()
        distributed.broadcast(values.view(-1).view(torch.uint8), 0)
        if values.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(values)

    def share_text(self, text: str) -> str:
        """The text that rank 0 gives, on every rank."""
        given = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = torch.tensor([len(text.encode())], dtype=torch.int64)
        distributed.broadcast(length, 0)
        taken = given if self.rank == 0 else torch.empty(max(1, int(length)), dtype=torch.uint8)
        distributed.broadcast(taken, 0)
        return taken.numpy().tobytes()[: int(length)].decode()

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

    def ended(self, seconds: float) -> list[int]:
        """The ranks whose processes have ended, or the first to end within so many seconds."""
        files: dict[int, int] = {}
        gone = []
        try:
            for rank, pid in enumerate(self.pids):
                if rank == self.rank:
                    continue
                try:
                    files[os.pidfd_open(pid)] = rank
                except ProcessLookupError:
                    gone.append(rank)
            found, _, _ = select.select(list(files), [], [], 0.0 if gone else seconds)
            return sorted([*gone, *(files[file] for file in found)])
        finally:
            for file in files:
                os.close(file)

    def close(self) -> None:
        """The folder is not needed any more."""
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def naming_lost(ranks: Ranks | None) -> Iterator[None]:
    """Around calls of torch.distributed, which says of a connection that was lost no more than its
    address. Raises StrataError in its place. `ranks`: where they are known."""
    try:
        yield
    except StrataError:
        raise
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        ended = ranks.ended(ENDED_S) if ranks is not None else []
        who = " and ".join(f"rank {rank}" for rank in ended) or "another rank"
        raise StrataError(
            f"{who} ended, or cannot be reached any more, before all ranks had come to train; its "
            f"own output says why ({str(error).splitlines()[0]:.200})"
        ) from error


def ranks_on_paper() -> Ranks | None:
    """The ranks of torch.distributed, if there is more than one, without a word to the others."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    count = distributed.get_world_size()
    return Ranks(distributed.get_rank(), count, "") if count > 1 else None


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
            share = f"one of {here['count']} shares of the machine's budgets"
            error.args = (f"{error} (rank {rank}: its host and ssd are {share})",)
            raise
    return found


def plans_of_one_page_size(config: Config, make_plan: Callable[[Config], Plan]) -> list[Plan]:
    """As plans_of_all(). Ranks hold different chunks and might choose different pages: `config`
    gets a size that all of them find."""
    plans = plans_of_all(config, make_plan)
    if len(plans) == 1:
        return plans
    config["page_bytes"] = min(plan["page_bytes"] for plan in plans)
    return plans_of_all(config, make_plan)


def find_ranks() -> Ranks | None:
    """The ranks of torch.distributed, if there is more than one.

    Raises:
        ValueError: they are not of one machine, or torch.distributed is still to be initialised.
        StrataError: another one has ended.
    """
    with naming_lost(None):
        return _find_ranks()


def _find_ranks() -> Ranks | None:
    started = processes_started()
    there = distributed.is_available() and distributed.is_initialized()
    if not there:
        if started > 1:
            raise ValueError(
                f"{started} processes were started, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group('gloo') before strata.wrap(); "
                "TrainingArguments(use_cpu=True) and Accelerator(cpu=True) do it as well"
            )
        return None
    found = ranks_on_paper()
    if found is None:
        return None
    _check_machine(found.rank, found.count)
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(found.count)]
    distributed.all_gather(pids, torch.tensor([os.getpid()], dtype=torch.int64))
    folder = _meeting_folder() if found.rank == 0 else ""
    return replace(found, folder=found.share_text(folder), pids=tuple(map(int, pids)))


def _check_machine(rank: int, count: int) -> None:
    """Raises ValueError where ranks cannot share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    here = f"{boot}{os.geteuid()}{os.readlink('/proc/self/ns/pid')}"
    mine = torch.tensor(list(hashlib.sha256(here.encode()).digest()), dtype=torch.uint8)
    all_of = [torch.empty_like(mine) for _ in range(count)]
    distributed.all_gather(all_of, mine)
    others = [i for i, other in enumerate(all_of) if not torch.equal(other, mine)]
    if others:
        raise ValueError(
            f"rank {rank} and rank {others[0]} are on different machines, in different containers, "
            "or of different users: ranks share memory for now; start all of them on one machine"
        )


def _meeting_folder() -> str:
    """Made for this run, with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    at = runtime if runtime and os.access(runtime, os.W_OK) else None
    return tempfile.mkdtemp(prefix="strata-ranks-", dir=at)
