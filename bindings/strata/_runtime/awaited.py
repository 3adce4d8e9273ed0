"""Says in the log which other rank this one waits for, where that takes long.

    watch = Watch(session, limit, board.say_awaited)     # of one of several ranks
    watch.end()

The core waits without the GIL, as long as another rank takes: it may be stopped, in a debugger or
by SIGSTOP, and go on. A thread of its own looks once in a while, and ends a wait for longer than
`limit` seconds (rank_timeout= of wrap).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._config.threads import Thread

if TYPE_CHECKING:
    from .._core import Session

PATIENCE_S = 10.0  # of a wait ahead of the first word
SAID_S = 0.9  # of a wait ahead of a word to other ranks
LOOK_S, LOOK_MIN_S = 1.0, 0.01

log = logging.getLogger("strata")


class Watch:
    """The thread that looks. Threads: any may end it."""

    def __init__(
        self, session: Session, limit: float | None, say: Callable[[int | None], None]
    ) -> None:
        """`limit`: in seconds; None: none. `say`: tells others whom this rank waits for, or that it
        does not any more."""
        self._session = session
        self._limit = limit
        self._say = say
        self._ended = threading.Event()
        self._thread = Thread(target=self._run, name="strata-awaited", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when it has ended."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        awaited: tuple[int, int] | None = None  # the rank, and what had come of it by then
        since, told, said = 0.0, False, False
        look = LOOK_S if self._limit is None else min(LOOK_S, max(self._limit / 10, LOOK_MIN_S))
        while not self._ended.wait(look):
            try:
                rank = self._session.awaited_rank()
                now = None if rank is None else (rank, self._session.heard_from(rank))
                if now is None or now != awaited:
                    if said:
                        self._say(None)
                        said = False
                    if told and awaited is not None:
                        log.warning("rank %d was waited for, and has come", awaited[0])
                    awaited, since, told = now, time.monotonic(), False
                    continue
                waited = time.monotonic() - since
                if not said and waited > SAID_S:
                    self._say(now[0])
                    said = True
                if self._limit is not None and waited > self._limit:
                    self._session.give_up_rank(now[0], waited)
            except RuntimeError:  # the session, or torch.distributed, has ended
                return
            if not told and waited > PATIENCE_S - LOOK_S:
                told = True
                log.warning(
                    "waiting for rank %d for %.0f s: it computes for longer, or is stopped; this "
                    "one goes on when it does",
                    now[0],
                    PATIENCE_S,
                )
