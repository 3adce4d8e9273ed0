"""Says in the log which other rank this one waits for, where that takes long.

    watch = Watch(session)     # of one of several ranks
    watch.end()

The core waits without the GIL, as long as another rank takes: it may be stopped, in a debugger or
by SIGSTOP, and go on. A thread of its own looks once in a while.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from .._errors import StrataError

if TYPE_CHECKING:
    from .._core import Session

PATIENCE_S = 10.0  # of a wait ahead of the first word
LOOK_S = 1.0

log = logging.getLogger("strata")


class Watch:
    """The thread that looks. Threads: any may end it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-awaited", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when it has ended."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        awaited: int | None = None
        since, told = 0.0, False
        while not self._ended.wait(LOOK_S):
            try:
                now = self._session.awaited_rank()
            except StrataError:  # the session has ended
                return
            if now != awaited:
                if told:
                    log.warning("rank %d was waited for, and has come", awaited)
                awaited, since, told = now, time.monotonic(), False
            elif now is not None and not told and time.monotonic() - since > PATIENCE_S - LOOK_S:
                log.warning(
                    "waiting for rank %d for %.0f s: it computes for longer, or is stopped; this "
                    "one goes on when it does",
                    now,
                    PATIENCE_S,
                )
                told = True
