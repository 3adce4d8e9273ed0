"""What all ranks do together, in phases: none begins the next one unless all have ended this.

    together = Together(state, "strata.save()")
    with together.phase() as phase:
        phase.said = {"path": path}        # JSON values
        ...                                # this rank's part
    phase.heard                            # what each rank said, by rank
    together.leads                         # this is rank 0

A process that is alone is a group of one, which hears itself and waits for nobody.

Note [Nobody waits in vain]. A rank whose part raises ends the phase as well, and says why: it goes
on with its own exception, and each of the others raises one that names it. A rank that dies says
nothing, but the core sees it, and every wait here looks there. One that is stopped is waited for,
for as long as torch.distributed waits (30 minutes, unless init_process_group() was told otherwise).

Format. What is said travels as the bytes of a JSON object, through torch.distributed, behind its
length: {"call", "said"}, or {"call", "error"}. Nothing is unpickled.

Use from the thread that trains: every rank, in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .._errors import StrataError
from .._runtime.wrapped import Wrapped
from .checkpoint_files import CheckpointError

if TYPE_CHECKING:
    from .._core import Session

PATIENCE_S = 10.0  # of a wait ahead of the first word
DEATH_S = 2.0  # in which the core sees that a rank has died
PAUSE_MIN_S, PAUSE_MAX_S = 1e-4, 1e-2

log = logging.getLogger("strata")


@dataclass
class Phase:
    """What ranks say to each other at the end of one."""

    said: Any = None  # by this rank; JSON values
    heard: list[Any] = field(default_factory=list)  # by rank, once the phase is over


class Together:
    """The ranks of a model's run, in one call that all of them make."""

    def __init__(self, state: Wrapped, call: str, patience_s: float = PATIENCE_S) -> None:
        """`call`: what users call it. `patience_s`: of a wait ahead of a word in the log."""
        self._session = state.session
        self._call = call
        self._patience_s = patience_s
        self.rank = state.ranks.rank if state.ranks is not None else 0
        self.count = state.ranks.count if state.ranks is not None else 1

    @property
    def leads(self) -> bool:
        """Whether this rank does what one alone does."""
        return self.rank == 0

    @contextlib.contextmanager
    def phase(self) -> Iterator[Phase]:
        """Around the part of this rank. Raises CheckpointError where that of another one failed,
        and StrataError where one has died."""
        phase = Phase()
        try:
            yield phase
            message = json.dumps({"call": self._call, "said": phase.said})
        except BaseException as error:
            why = f"{type(error).__name__}: {error!s:.1000}"
            self._exchange(json.dumps({"call": self._call, "error": why}))
            raise
        messages = [json.loads(text) for text in self._exchange(message)]
        for rank, heard in enumerate(messages):
            if heard["call"] != self._call:
                raise CheckpointError(
                    f"rank {rank} is in {heard['call']} and rank {self.rank} in {self._call}: all "
                    "ranks make the same calls, in the same order"
                )
        for rank, heard in enumerate(messages):
            if "error" in heard:
                raise CheckpointError(f"{self._call} failed on rank {rank}: {heard['error']}")
        phase.heard = [heard["said"] for heard in messages]

    def agree(self, what: str, values: list[Any]) -> None:
        """Raises CheckpointError unless all ranks said the same. `what`: it is."""
        for rank, value in enumerate(values):
            if value != values[0]:
                raise CheckpointError(
                    f"{self._call} was given different {what}: {values[0]!s:.300} on rank 0, and "
                    f"{value!s:.300} on rank {rank}"
                )

    def _exchange(self, message: str) -> list[str]:
        """The messages of all ranks, by rank."""
        if self.count == 1:
            return [message]
        raw = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([raw.numel()], dtype=torch.int64))
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: raw.numel()] = raw
        found = zip(self._gather(padded), lengths, strict=True)
        return [value[: int(length)].numpy().tobytes().decode() for value, length in found]

    def _gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Those of all ranks, by rank: of the same size. See Note [Nobody waits in vain]."""
        values = [torch.empty_like(value) for _ in range(self.count)]
        try:
            work = distributed.all_gather(values, value, async_op=True)
            self._await(work)
            work.wait()
        except StrataError:
            raise
        except RuntimeError:  # a connection was lost
            name_dead(self._session)
            raise
        return values

    def _await(self, work: distributed.Work) -> None:
        """Returns when it is over. Raises StrataError where a rank has died."""
        begin, pause, told = time.monotonic(), PAUSE_MIN_S, False
        while not work.is_completed():
            self._session.awaited_rank()
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
            if not told and time.monotonic() - begin > self._patience_s:
                told = True
                log.warning(
                    "%s waits for other ranks for %.0f s: every rank has to call it",
                    self._call,
                    self._patience_s,
                )


def name_dead(session: Session) -> None:
    """Behind an exception of torch.distributed, which has lost a connection: raises StrataError
    with whose it was, if a rank has died."""
    end = time.monotonic() + DEATH_S
    while time.monotonic() < end:
        session.awaited_rank()
        time.sleep(PAUSE_MAX_S)


def owned(state: Wrapped, param: int, rank: int) -> list[tuple[int, int]]:
    """The elements of a parameter that a rank owns, as (first, count), from the first on."""
    return [(first, count) for of, first, count in state.session.owners(param) if of == rank]


def keeper_of(state: Wrapped, parts: tuple[int, ...]) -> int:
    """The rank that owns most elements of a tensor, and so reads or writes it in a file."""
    counts: dict[int, int] = {0: 0}
    for part in parts:
        for rank, _, count in state.session.owners(part):
            counts[rank] = counts.get(rank, 0) + count
    return max(counts, key=lambda rank: (counts[rank], -rank))


def refuse_snapshots(state: Wrapped) -> None:
    """Raises ValueError where ranks train the model: snapshots are of a process that is alone."""
    if state.ranks is not None:
        raise ValueError(
            "snapshots of several ranks are not there yet, and so are not strata.save(wait=False) "
            "and strata.load() of a snapshot: use strata.save(model, path), which waits, and "
            "strata.load() of what it wrote"
        )
