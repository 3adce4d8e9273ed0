"""What all ranks do together, in phases: none begins the next one unless all have ended this.

    together = Together.of(state, "strata.save()")
    with together.phase() as phase:
        phase.said = {"path": path}        # JSON values
        ...                                # this rank's part
    phase.heard                            # what each rank said, by rank
    together.leads                         # this is rank 0
    together.pass_on(memory, 3, None)      # what rank 3 has in it, on all of them
    beside = Together.beside(board, "strata.snapshot()", key)   # the same, on a thread
    heard = beside.hear(place)             # what all said in beside.tell(), wherever they are

A process that is alone is a group of one, which hears itself and waits for nobody.

Note [Roll call]. The first thing that a rank says in a call of the thread that trains is which call
it is, on a board. A rank that is in another one, or that has gone on to where it waits for this one
without a word, is named at once, and nothing was sent that a later call could take for its own. The
first rank that has heard all, or has given up, decides for all: the one that was given up may still
come, and would wait for a rank that has gone.

Note [Nobody waits in vain]. A rank whose part raises ends the phase as well, and says why: it goes
on with its own exception, and each of the others raises one that names it. A rank that dies says
nothing, but the core sees it, and every wait here looks there. One that is stopped is waited for,
for as long as torch.distributed waits (30 minutes, unless init_process_group() was told otherwise),
and named in the log: its core takes nothing that is said to it.

Format. What is said travels as a JSON object: {"call", "said"}, or {"call", "error"}. The thread
that trains sends it by _config/rank_group.py, and others by rank_board.py. Nothing is unpickled.

Use from one thread: every rank, in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from .._config.rank_group import Collectives
from .._errors import StrataError
from .._runtime.wrapped import Wrapped
from .checkpoint_files import CheckpointError
from .rank_board import (
    NO_MORE,
    PATIENCE_S,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    Board,
    naming_dead,
)

Exchange = Callable[[str], list[str]]
"""Gives what all ranks say, by rank, for what this one says."""

MET = "all ranks are in a call"
LAST_WORDS_S = 1.0  # of a rank that has ended, in which what it said arrives
LOOKS, LOOK_S = 3, 1.0  # at who is stopped, and between two: the first one asks

log = logging.getLogger("strata")


@dataclass
class Phase:
    """What ranks say to each other at the end of one."""

    said: Any = None  # by this rank; JSON values
    heard: list[Any] = field(default_factory=list)  # by rank, once the phase is over


class Together:
    """The ranks of a model's run, in one call that all of them make."""

    def __init__(
        self,
        call: str,
        rank: int,
        count: int,
        exchange: Exchange,
        collectives: Collectives | None = None,
        begin: Callable[[str], list[str]] | None = None,
    ) -> None:
        """`call`: what users call it; `begin`: says to all that this rank is in the call, and gives
        what they said."""
        self._call = call
        self.rank, self.count = rank, count
        self._say = exchange
        self._collectives = collectives
        self._begin = begin

    @staticmethod
    def of(state: Wrapped, call: str, patience_s: float = PATIENCE_S) -> Together:
        """For the thread that trains. `patience_s`: of a wait ahead of a word in the log."""
        if state.ranks is None:
            return Together.alone(call)
        ranks, waits = state.ranks, _Waits(state, call, patience_s)
        calls, roll = Collectives(ranks.group, waits.complete), roll_of(state)

        def begin(message: str) -> list[str]:
            roll.begin(message)
            try:
                waits.until(lambda: roll.complete(call), roll.timeout_s)
            except CheckpointError as error:
                roll.give_up(error)
            return roll.met()

        return Together(call, ranks.rank, ranks.count, calls.exchange, calls, begin)

    @staticmethod
    def alone(call: str) -> Together:
        """Of a process that is."""
        return Together(call, 0, 1, lambda message: [message])

    @staticmethod
    def beside(board: Board, call: str, key: str) -> Together:
        """For a thread of its own. `key`: of the call, the same on all ranks, and no other's."""
        exchanges = 0

        def exchange(message: str) -> list[str]:
            nonlocal exchanges
            exchanges += 1
            board.post(f"{key}/{exchanges}", message)
            return board.hear(f"{key}/{exchanges}", call)

        return Together(call, board.rank, board.count, exchange)

    @property
    def leads(self) -> bool:
        """Whether this rank does what one alone does."""
        return self.rank == 0

    def pass_on(self, memory: torch.Tensor, source: int, failed: BaseException | None) -> None:
        """Fills the memory, of the same size on all ranks, with what rank `source` has in its own.
        Raises `failed` there, which it was not read for, and CheckpointError on the others.
        REQUIRES: there are several ranks; made by of()."""
        assert self._collectives is not None
        status = torch.tensor([failed is not None], dtype=torch.uint8)
        self._collectives.broadcast(status, source)
        if failed is not None:
            raise failed
        if status.any():
            raise CheckpointError(f"{self._call} failed on rank {source}, which reads for others")
        if memory.numel():
            self._collectives.broadcast(memory, source)

    @contextlib.contextmanager
    def phase(self) -> Iterator[Phase]:
        """Around the part of this rank. Raises CheckpointError where that of another one failed,
        and StrataError where one has died."""
        phase = Phase()
        try:
            yield phase
            message = self.message(phase.said)
        except BaseException as error:
            with contextlib.suppress(CheckpointError):  # its own counts
                self._exchange(self.failure(error))
            raise
        phase.heard = self.understand(self._exchange(message))

    def _exchange(self, message: str) -> list[str]:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self.understand(begin(self.message(None)))
        return self._say(message)

    def message(self, said: Any) -> str:
        """What a rank says of its part."""
        return json.dumps({"call": self._call, "said": said})

    def failure(self, error: BaseException) -> str:
        """What a rank says of one that has failed."""
        return json.dumps({"call": self._call, "error": f"{type(error).__name__}: {error!s:.1000}"})

    def understand(self, messages: list[str]) -> list[Any]:
        """What ranks have said, by rank. Raises CheckpointError where one has failed, or made
        another call."""
        found = [json.loads(text) for text in messages]
        for rank, heard in enumerate(found):
            if heard["call"] != self._call:
                raise CheckpointError(
                    f"rank {rank} is in {heard['call']} and rank {self.rank} in {self._call}: all "
                    "ranks make the same calls, in the same order"
                )
        for rank, heard in enumerate(found):
            if "error" in heard:
                raise CheckpointError(f"{self._call} failed on rank {rank}: {heard['error']}")
        return [heard["said"] for heard in found]

    def agree(self, what: str, values: list[Any]) -> None:
        """Raises CheckpointError unless all ranks said the same. `what`: it is."""
        for rank, value in enumerate(values):
            if value != values[0]:
                raise CheckpointError(
                    f"{self._call} was given different {what}: {values[0]!s:.300} on rank 0, and "
                    f"{value!s:.300} on rank {rank}"
                )


class Roll:
    """Who is in which call: see Note [Roll call]. Of one thread that trains."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._keys: list[str] = []  # of the last two calls: before those all have been in one
        self._step, self._count = 0, 0  # of the last one
        self._place = 0
        self._words: dict[int, str] = {}  # by rank, of those that are in it
        self._ranks = range(board.count)

    def begin(self, message: str) -> None:
        """This rank is in a call. Raises StrataError where a rank has died."""
        self._place = self._board.place()
        step = self._place // 2  # wherever in its step each is
        self._count = self._count + 1 if self._step == step else 1
        self._step = step
        self._keys.append(f"{step}.{self._count}")
        self._words = {self._board.rank: message}
        self._board.post(self._keys[-1], message)
        if len(self._keys) > 2:
            self._board.forget(self._keys.pop(0))

    def complete(self, call: str) -> bool:
        """All are in a call. Raises CheckpointError where one has gone on without."""
        places = self._board.places()
        for rank in set(range(self._board.count)) - set(self._words):
            if (word := self._board.look(self._keys[-1], rank)) is not None:
                self._words[rank] = word
        missing = sorted(set(range(self._board.count)) - set(self._words))
        self._board.check_passed(missing, places, self._place, call, comes_later=True)
        return not missing

    def give_up(self, error: CheckpointError) -> None:
        """Raises the error, and ends the call for all, unless another one has met all of them."""
        if self._board.decide(self._keys[-1], str(error)) != MET:
            raise error

    def met(self) -> list[str]:
        """What all ranks said, by rank. REQUIRES: all are in a call. Raises CheckpointError where
        another one has given up."""
        if (why := self._board.decide(self._keys[-1], MET)) != MET:
            raise CheckpointError(why)
        words = (self._words.get(r) or self._board.look(self._keys[-1], r) for r in self._ranks)
        return [word for word in words if word is not None]

    @property
    def timeout_s(self) -> float:
        """How long it is waited for."""
        return self._board.timeout_s

    def leave(self, call: str) -> None:
        """This rank is in a call that waits for others by itself."""
        self.begin(json.dumps({"call": call, "said": None}))


def roll_of(state: Wrapped) -> Roll:
    """The model's, made where it has none. REQUIRES: there are several ranks."""
    if state.roll is None:
        board = Board.of(state, "calls")
        assert board is not None
        state.roll = Roll(board)
    roll: Roll = state.roll
    return roll


class _Waits:
    """How the thread that trains waits for other ranks. See Note [Nobody waits in vain]."""

    def __init__(self, state: Wrapped, call: str, patience_s: float) -> None:
        self._session, self._call = state.session, call
        self._patience_s = patience_s

    def complete(self, begin: Callable[[], distributed.Work]) -> None:
        """Begins a call of all ranks, and returns when it is over. Raises StrataError where a rank
        has died."""
        with naming_dead(self._session):
            work = begin()
            self._await(work.is_completed)
            work.wait()

    def until(self, over: Callable[[], bool], timeout_s: float) -> None:
        """Returns when it says yes. Raises StrataError where a rank has died."""
        end = time.monotonic() + timeout_s

        def look() -> bool:
            if (yes := over()) or time.monotonic() < end:
                return yes
            raise RuntimeError(f"{self._call} has waited for other ranks for {timeout_s:.0f} s")

        with naming_dead(self._session):
            self._await(look)

    def _await(self, over: Callable[[], bool]) -> None:
        """Returns when it says yes. Raises StrataError where a rank has died."""
        pause, apart = PAUSE_MIN_S, min(LOOK_S, self._patience_s / 3)
        looks: list[set[int]] = []  # ranks that were silent at each
        look = time.monotonic() + self._patience_s - (LOOKS - 1) * apart
        left: tuple[int, float] | None = None  # the first to end its training, and when it was seen
        while not over():
            try:
                self._session.awaited_rank()
            except StrataError:
                if self._comes_soon(over):
                    return
                raise
            if left is None and NO_MORE in (places := self._session.rank_places()):
                left = places.index(NO_MORE), time.monotonic()
            if left is not None and time.monotonic() - left[1] > self._patience_s:
                self._refuse_left(left[0])
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
            if len(looks) == LOOKS or time.monotonic() < look:
                continue
            looks.append(set(self._session.silent_ranks()))
            look += apart
            if len(looks) == LOOKS:
                self._tell(sorted(looks[-2] & looks[-1]))

    def _comes_soon(self, over: Callable[[], bool]) -> bool:
        """Whether the last words of a rank that has ended, which say why, are on their way. Of its
        end others may hear first."""
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end:
            if over():
                return True
            time.sleep(PAUSE_MAX_S)
        return False

    def _refuse_left(self, rank: int) -> None:
        """Who has left behind this call said all that others wait for, which may be on its way, or
        pass through a rank that is stopped."""
        if self._session.silent_ranks():
            return
        raise CheckpointError(
            f"rank {rank} has ended its training without {self._call}, which every rank has to call"
        )

    def _tell(self, stopped: list[int]) -> None:
        who = " and ".join(f"rank {rank}" for rank in stopped)
        log.warning(
            "%s waits for %s for %.0f s: %s",
            self._call,
            who or "other ranks",
            self._patience_s,
            f"{'they are' if len(stopped) > 1 else 'it is'} stopped, and waited for"
            if who
            else "every rank has to call it",
        )


def owned(state: Wrapped, param: int, rank: int) -> list[tuple[int, int]]:
    """The elements of a parameter that a rank owns, as (first, count), from the first on."""
    return [(first, count) for of, first, count in state.session.owners(param, rank) if of == rank]


def keeper_of(state: Wrapped, parts: tuple[int, ...]) -> int:
    """The rank that owns most elements of a tensor, for rank 0, and so reads or writes it in a
    file."""
    counts: dict[int, int] = {0: 0}
    for part in parts:
        for rank, _, count in state.session.owners(part, 0):
            counts[rank] = counts.get(rank, 0) + count
    return max(counts, key=lambda rank: (counts[rank], -rank))
