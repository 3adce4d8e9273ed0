"""The ranks that train together, on one machine or several, as torch.distributed has started them.

    ranks = find_ranks(rank_group)        # None: this process is alone
    ranks.machines                        # by rank: the name of its machine; none: all are of one
    ranks.folder                          # where those of a machine meet, of this user alone
    ranks.group                           # which sends tensors in CPU memory
    ranks.hear(value)                     # what all of them say
    ranks.share(tensor)                   # what rank 0 has
    ranks.least(free_bytes)               # the smallest of what they have
    ranks.close()
    with naming_lost(ranks): ...          # who has ended is named, where torch only lost it
    ranks_there()                         # those of all processes, with their machines, and no more
    ranks_on_paper(rank_group)            # the same for a plan: asks nobody, any rank alone may
    paper_ranks(8, machines=2)            # of a run that there is not
    plans_of_all(config, make_plan)       # what every rank would plan, without asking
    plans_of_one_page_size(config, make_plan)

Ranks are those within `rank_group` (of strata.wrap(); None: all processes). All calls of a Ranks
that was found are calls that every rank makes, in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .._errors import StrataError
from .._torch_compat import copy_rows, default_store
from . import machine
from .launched import processes_started, restarts_share_a_store
from .rank_group import Collectives, cpu_group, group_of, meets_over_a_file

if TYPE_CHECKING:
    from .._core import Config, Plan
    from .._core import Ranks as RanksSpec

TIMEOUT_S = 60.0
TIMEOUT_MAX_S = 1e9
PATIENCE_MAX_S = 86_400.0
# At least, with a rank of another machine that says nothing: all others end within 10 s of its end.
PATIENCE_S = 8.0
RANK_GRADIENTS = ("mean", "sum")
# Whether pages of other ranks come from their GPUs: where that is faster than from host memory.
GPU_LENDING = ("faster", "always", "never")
LOST = re.compile(r"gloo|Connection (closed|reset)|Broken pipe")  # what torch says then
AHEAD = ", before all ranks had come to train"
ENDED_S = 1.0  # a connection is lost ahead of the process that had it

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Ranks:
    """This process among them."""

    rank: int
    count: int
    folder: str  # none: on paper
    run: str = ""  # a name that no other run has
    pids: tuple[int, ...] = ()  # by rank; 0 of another machine; none: on paper
    machines: tuple[str, ...] = ()  # by rank: its name; none: all are of one
    group: Any = field(default=None, repr=False)  # of cpu_group(); None: on paper
    store: Any = field(default=None, repr=False)  # torch's, where they began; None: on paper

    def spec(
        self, *, gradients: str, gathers: str, sums: str, timeout_s: float | None
    ) -> RanksSpec:
        """As the core takes it. `gradients`: one of RANK_GRADIENTS; `gathers`: of RANK_GATHERS;
        `sums`: of RANK_SUMS; `timeout_s`: rank_timeout."""
        return {
            "rank": self.rank,
            "count": self.count,
            "machines": list(self.machines),
            "patience_s": min(max(PATIENCE_S, timeout_s or 0.0), PATIENCE_MAX_S),
            "folder": self.folder,
            "pids": list(self.pids),
            "timeout_s": TIMEOUT_S,
            "sums": gradients == "sum",
            "coded_gathers": gathers == "int8",
            "machine_sums": sums == "machines",
            "device_lending": gpu_lending(),  # type: ignore[typeddict-item]
        }

    @property
    def together(self) -> int:
        """The most ranks that a machine has: all share out what theirs has alike."""
        return _most(self.machines, self.count)

    def hear(self, said: Any) -> list[Any]:
        """What each rank said, by rank: JSON values."""
        return [json.loads(text) for text in Collectives(self.group).exchange(json.dumps(said))]

    def share(self, tensor: torch.Tensor) -> None:
        """Gives every rank the values of rank 0, in place."""
        values = tensor.detach().cpu().contiguous()
        Collectives(self.group).broadcast(values.view(-1).view(torch.uint8), 0)
        if values.data_ptr() != tensor.data_ptr():
            copy_rows(tensor, values)

    def least(self, number: int) -> int:
        """The smallest number that a rank has; on paper this one's."""
        return Collectives(self.group).least(number) if self.folder else number

    def ended(self, seconds: float) -> list[int]:
        """Of this machine: the ranks whose processes have ended, or the first to end within so many
        seconds."""
        files: dict[int, int] = {}
        gone = []
        try:
            for rank, pid in enumerate(self.pids):
                if rank == self.rank or pid == 0:
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
        if _here(self.rank, self.count, self.machines)[0] == self.rank:
            shutil.rmtree(self.folder, ignore_errors=True)


def gpu_lending() -> str:
    """As STRATA_GPU_LENDING has it. Raises ValueError for what it cannot be."""
    asked = os.environ.get("STRATA_GPU_LENDING", GPU_LENDING[0])
    if asked not in GPU_LENDING:
        raise ValueError(f"STRATA_GPU_LENDING is {asked!r}: it is one of {', '.join(GPU_LENDING)}")
    return asked


@contextlib.contextmanager
def all_or_none(ranks: Ranks | None) -> Iterator[Callable[[], None]]:
    """Where a rank raises inside, the others raise ValueError with its words. All ranks come here.

    Yields what they call in the middle, where nobody may go on alone: it returns when all have come
    so far, or ends the block. Nobody asks the others for anything inside, but right behind it.
    """
    ends: list[BaseException] = []

    def come_so_far() -> None:
        try:
            _refuse_as_others(ranks)
        except BaseException as error:
            ends.append(error)
            raise

    try:
        yield come_so_far
    except BaseException as error:
        if ends:  # whatever the core has made of it
            raise ends.pop() from None
        if ranks is not None and isinstance(error, Exception):
            with contextlib.suppress(RuntimeError):  # of others that have ended meanwhile
                ranks.hear(f"{type(error).__name__}: {error!s:.1000}")
        raise
    _refuse_as_others(ranks)


def _refuse_as_others(ranks: Ranks | None) -> None:
    """Raises ValueError where another rank has refused."""
    for rank, why in enumerate(ranks.hear("") if ranks is not None else []):
        if why:
            raise ValueError(f"strata.wrap() was refused on rank {rank}: {why}")


@contextlib.contextmanager
def naming_lost(ranks: Ranks | None, when: str = AHEAD) -> Iterator[None]:
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
            f"{who} ended, or cannot be reached any more{when}; its own output says why "
            f"({str(error).splitlines()[0]:.200})"
        ) from error


def ranks_on_paper(rank_group: Any = None) -> Ranks | None:
    """The ranks of a group, if there is more than one, without a word to the others. Raises as
    group_of()."""
    group = group_of(rank_group)
    if group is None or len(group.members) == 1:
        return None
    machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # agents of torchrun
    places = paper_ranks(distributed.get_world_size(), machines).machines
    names = tuple(places[of] for of in group.members if places)
    several = len(set(names)) > 1
    return Ranks(group.rank, len(group.members), "", machines=names if several else ())


def paper_ranks(count: int, machines: int = 1) -> Ranks:
    """The first of so many, as many on each machine as far as that goes."""
    if machines == 1:
        return Ranks(0, count, "")
    names = tuple(f"machine-{rank * machines // count}" for rank in range(count))
    return Ranks(0, count, "", machines=names)


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
            parts = _most(here["machines"], here["count"])
            share = f"one of {parts} shares of the machine's budgets"
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


def find_ranks(rank_group: Any = None) -> Ranks | None:
    """The ranks of a group, if there is more than one.

    Raises:
        ValueError: torch.distributed is still to be initialised; or as group_of(), as TypeError.
        StrataError: another one has ended, or cannot be reached.
    """
    with naming_lost(None):
        return _find_ranks(rank_group)


def ranks_there() -> Ranks | None:
    """The ranks of all processes, if there is more than one, with the names of their machines. All
    ranks ask at the same moment."""
    found = _joined(None)
    if found is None:
        return None
    machines, folders = _places(found)
    shutil.rmtree(folders[found.rank], ignore_errors=True)
    return replace(found, machines=machines)


def _joined(rank_group: Any) -> Ranks | None:
    """As ranks_on_paper(), with a group that sends."""
    found, group = ranks_on_paper(rank_group), group_of(rank_group)
    if found is None or group is None:
        return None
    return replace(found, group=cpu_group(group), store=default_store())


def _find_ranks(rank_group: Any) -> Ranks | None:
    started = processes_started()
    if started > 1 and group_of(None) is None:
        raise ValueError(
            f"{started} processes were started, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group('gloo') before strata.wrap(); "
            "TrainingArguments(use_cpu=True) and Accelerator(cpu=True) do it as well"
        )
    found = _joined(rank_group)
    if found is None:
        return None
    if found.rank == 0 and restarts_share_a_store():
        log.warning(
            "ranks that torchrun starts again may look for those that died, in the store that all "
            "of them use (PyTorch issue 135712): give torchrun "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and no --master-addr"
        )
    if found.rank == 0 and meets_over_a_file():
        log.warning(
            "ranks meet over a file (init_method='file://...'): where one is killed while it "
            "writes there, the others may read for ever: use torchrun, or init_method='tcp://...'"
        )
    pids = found.hear(os.getpid())
    machines, folders = _places(found)
    here = _here(found.rank, found.count, machines)
    if machines:
        log.info(
            "ranks of %d machines, which do not share memory: %s; pages and gradients go from one "
            "to another over torch.distributed (gloo)",
            len(set(machines)),
            ", ".join(f"rank {rank} on {name}" for rank, name in enumerate(machines)),
        )
    return replace(
        found,
        folder=folders[here[0]],
        run=os.path.basename(folders[0]),
        pids=tuple(pid if rank in here else 0 for rank, pid in enumerate(pids)),
        machines=machines,
    )


def _places(ranks: Ranks) -> tuple[tuple[str, ...], list[str]]:
    """By rank: the name of its machine (none: there is one), and the folder that it has made, which
    the first of each machine does. Whoever does not see the one of its machine, as in a container
    with a /tmp of its own, counts as of another machine."""
    said = ranks.hear(_machine())
    while True:
        machines = _named(said)
        first = _here(ranks.rank, ranks.count, machines)[0]
        own = ""
        try:
            with all_or_none(ranks):
                own = _meeting_folder() if first == ranks.rank else ""
            folders = ranks.hear(own)
            sees = ranks.hear(_sees(folders[first]))
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        if all(sees):
            return machines, folders
        shutil.rmtree(own, ignore_errors=True)
        for of, saw in zip(said, sees, strict=True):
            of["memory"] += "" if saw else " apart"


def _sees(folder: str) -> bool:
    return os.path.isdir(folder)


def _machine() -> dict[str, str]:
    """What this process says of where it is. `memory`: ranks that say the same can share theirs."""
    own = os.environ.get("STRATA_MACHINE", "")  # ranks of one host that are to count as of several
    memory = f"{machine.boot_id()} {os.geteuid()} {machine.pid_namespace()} {own}"
    return {"name": own or socket.gethostname(), "memory": memory}


def _named(said: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """By rank, of what each said by _machine(): what its machine is called. Containers of one host,
    and users, have the same name. None: there is one machine."""
    places = [(of["name"], of["memory"]) for of in said]
    different = list(dict.fromkeys(places))
    if len(different) == 1:
        return ()
    shown: dict[tuple[str, str], str] = {}
    for one in different:
        others = sum(other[0] == one[0] for other in shown)
        shown[one] = f"{one[0]} ({others + 1})" if others else one[0]
    return tuple(shown[one] for one in places)


def _here(rank: int, count: int, machines: Sequence[str]) -> list[int]:
    """The ranks of the machine of that one."""
    return [of for of in range(count) if not machines or machines[of] == machines[rank]]


def _most(machines: Sequence[str], count: int) -> int:
    """Ranks of the machine that has most."""
    return max(Counter(machines).values(), default=count)


def _meeting_folder() -> str:
    """Made for this run, with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    at = runtime if runtime and os.access(runtime, os.W_OK) else None
    return tempfile.mkdtemp(prefix="strata-ranks-", dir=at)
