"""What ranks tell each other from threads of their own, beside the training.

    board = Board.of(state, "snapshots")         # None: this process is alone
    place = board.place()                        # how far this rank has come
    board.post(f"{place}/call", "...")           # at once; by the thread that trains, too
    messages = board.hear(f"{place}/call", "strata.snapshot()", place)       # waits; by rank
    word = board.look(f"{place}/call", 1)        # what rank 1 has posted; None: nothing so far
    board.meet("end", "strata.unwrap()", place)  # waits for all who still train

Words go through the store that torch.distributed has begun with: each is a key of it, which only
its rank writes, and which goes when all have read it. So no collective of the user's is ever
crossed, and nobody waits for a thread that trains. Nothing that is heard is unpickled.

Note [Who did not call]. Where a rank has come further than this one was at its call, and has said
nothing of the call, it made none: it would have said so before. The core knows how far each has
come (Session.rank_places()): behind a step it is enough that one has begun the next backward pass,
which may wait for this one and never end. In the middle of an accumulation, where ranks may have
different numbers of passes, it has to end the step. And so it has where a call may come after
gradients of some ranks alone, which are dropped (a load), or stay (a save): a rank that is in
step() waits there for all others. One that waits in its backward pass says so, after a second
(say_awaited()); with where it is, so that nobody takes it for a wait of before.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import distributed

from .._errors import StrataError
from .._runtime.wrapped import Wrapped
from .checkpoint_files import CheckpointError

if TYPE_CHECKING:
    from .._config.ranks import Ranks
    from .._core import Session

PATIENCE_S = 10.0  # of a wait ahead of the first word
DEATH_S = 2.0  # in which the core sees that a rank has died
NO_MORE = 2**63 - 1  # the place of a rank that has ended its training
PAUSE_MIN_S, PAUSE_MAX_S = 1e-4, 1e-2

log = logging.getLogger("strata")


def name_dead(session: Session) -> None:
    """Behind an exception of torch.distributed, which has lost a connection: raises StrataError
    with whose it was, if a rank has died."""
    end = time.monotonic() + DEATH_S
    while time.monotonic() < end:
        session.awaited_rank()
        time.sleep(PAUSE_MAX_S)


@contextlib.contextmanager
def naming_dead(session: Session) -> Iterator[None]:
    """Around calls of torch.distributed: where one fails because a rank has died, StrataError says
    which."""
    try:
        yield
    except (StrataError, CheckpointError):
        raise
    except RuntimeError:
        name_dead(session)
        raise


class Board:
    """Of one rank. Threads: one hears; any may post."""

    def __init__(self, session: Session, ranks: Ranks, name: str) -> None:
        """`name`: of what it is for."""
        self._session = session
        self.rank, self.count = ranks.rank, ranks.count
        self._first = ranks.store  # what it serves ends with it
        # A connection of its own, where it has any: others would wait for ours.
        own = self._first.clone() if hasattr(self._first, "clone") else self._first
        # The run has a name that no other one has, and all of its ranks.
        self._store = distributed.PrefixStore(f"strata/{ranks.run}/{name}", own)
        self._waits = distributed.PrefixStore(f"strata/{ranks.run}/waits", own)
        self._heard: list[str] = []  # by this rank, of which others may still read what it said

    @staticmethod
    def of(state: Wrapped, name: str) -> Board | None:
        """Of a wrapped model. `name`: of what it is for; each thread has a board of its own."""
        if state.ranks is None:
            return None
        return Board(state.session, state.ranks, name)

    def places(self) -> list[int]:
        """How far each rank has come, by rank, as this one knows; NO_MORE: it goes no further."""
        return self._session.rank_places()

    def place(self) -> int:
        """How far this rank has come: twice its step, and one more within its backward passes."""
        return self._session.rank_places()[self.rank]

    def post(self, key: str, message: str) -> None:
        """Says it to all. Raises StrataError where a rank has died."""
        with naming_dead(self._session):
            self._store.set(self._own(key), message)
            self._store.check([self._own(key)])  # it is there, ahead of what this rank does next

    def decide(self, key: str, outcome: str) -> str:
        """What the first rank that asks has decided, which holds for all. Not empty."""
        with naming_dead(self._session):
            return str(self._store.compare_set(f"{key}/decided", "", outcome).decode())

    def hear(self, key: str, call: str, place: int | None = None) -> list[str]:
        """What all have posted, by rank. Raises StrataError where one has died. `call`: what users
        call it; `place`: where this rank was at the call, and CheckpointError where another one was
        there and did not call."""
        with naming_dead(self._session):
            self._await(key, call, place)
            found = [self._store.get(f"{key}/{rank}").decode() for rank in range(self.count)]
            # All threads have come here, and so have heard what came before.
            for old in self._heard if place is None else []:
                self._store.delete_key(self._own(old))
        self._heard = [key] if place is None else [*self._heard, key]
        return found

    def meet(self, key: str, call: str, place: int) -> None:
        """Returns when all ranks that still train have made the call, of which there is one with
        this key. Raises StrataError where one has died, and CheckpointError as hear() does."""
        self.post(key, "")
        with naming_dead(self._session):
            self._await(key, call, place, all_train=False)

    def look(self, key: str, rank: int) -> str | None:
        """What that rank has posted; None: nothing so far."""
        word = f"{key}/{rank}"
        return self._store.get(word).decode() if self._store.check([word]) else None

    def forget(self, key: str) -> None:
        """What this rank has posted, which nobody hears any more, and what was decided."""
        self._store.delete_key(self._own(key))
        self._store.delete_key(f"{key}/decided")

    @property
    def timeout_s(self) -> float:
        """How long torch.distributed waits."""
        return float(self._first.timeout.total_seconds())

    def check_passed(
        self, missing: Iterable[int], places: list[int], place: int, call: str, comes_later: bool
    ) -> None:
        """Raises CheckpointError where one of these, which had said nothing of the call when
        `places` were seen, is beyond this place. `comes_later`: one that has begun a backward pass
        may yet come, unless it waits there for this rank. See Note [Who did not call]."""
        begun = place | 1  # by who may yet end a backward pass, and come
        for rank in missing:
            if places[rank] == NO_MORE:
                raise CheckpointError(
                    f"rank {rank} has ended its training without {call}, which every rank has to "
                    "call"
                )
            if places[rank] > (begun if comes_later else place) or self._awaits_this(rank, place):
                step, passes = divmod(places[rank], 2)
                where = f"in backward() of step {step}" if passes else f"behind step {step - 1}"
                raise CheckpointError(
                    f"rank {rank} has gone on without {call}, which rank {self.rank} is in: it is "
                    f"{where}; every rank makes the same calls, behind the same steps"
                )

    def say_awaited(self, awaited: int | None) -> None:
        """From here on this rank waits for that one in the middle of a step; None: for none."""
        rank = -1 if awaited is None else awaited  # the key stays: others may be about to read it
        self._waits.set(str(self.rank), f"{rank} {self.place()}")

    def _awaits_this(self, rank: int, place: int) -> bool:
        """That rank waits for this one, and beyond this place."""
        if not self._waits.check([str(rank)]):
            return False
        awaited, at = map(int, self._waits.get(str(rank)).split())
        return awaited == self.rank and at > place

    def _own(self, key: str) -> str:
        return f"{key}/{self.rank}"

    def _await(self, key: str, call: str, place: int | None, all_train: bool = True) -> None:
        """`all_train`: also of those that have ended their training the word is needed."""
        begin, pause, told = time.monotonic(), PAUSE_MIN_S, False
        missing = [rank for rank in range(self.count) if rank != self.rank]
        while True:
            self._session.awaited_rank()  # raises where one has died
            places = self._session.rank_places()
            missing = [
                rank
                for rank in missing
                if (all_train or places[rank] != NO_MORE)
                and not self._store.check([f"{key}/{rank}"])
            ]
            if not missing:
                return
            if place is not None:
                self.check_passed(missing, places, place, call, comes_later=not all_train)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
            if not told and time.monotonic() - begin > PATIENCE_S:
                told = True
                names = " and ".join(f"rank {rank}" for rank in missing)
                log.warning(
                    "%s waits for %s for %.0f s: every rank has to call it",
                    call,
                    names,
                    PATIENCE_S,
                )
