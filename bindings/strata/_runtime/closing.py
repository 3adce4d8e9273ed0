"""Ends a session when nothing can reach its model any more, and at the interpreter's exit.

    close = close_behind(state, Ending(session, landings, recorder, ...))
    close()                     # now; nothing the second time
    close_unreachable()         # those whose models nobody can reach any more, too

Threads: Python may collect a model on any of them.

Note [Collected among ranks]. A session of several ranks ends when all of them end theirs. Ranks
collect a model at moments of their own, and one that waited there would never come to where
another waits for it: in a collective call, ahead of its own collection. So what is collected waits
on a thread. A call of unwrap() waits itself, and so does the interpreter's exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _core  # ahead of what is registered below: see there
from .._config.threads import Thread
from .._errors import StrataError
from .lander import Landings

if TYPE_CHECKING:
    from .._profiling.recorder import Recorder

PATIENCE_S = 10.0  # of a wait ahead of a word in the log

Calls = list[Callable[[], None]]

log = logging.getLogger("strata")


class Ending:
    """What the end of one session takes. Threads: one runs it; any may give it up meanwhile."""

    def __init__(
        self,
        session: _core.Session,
        landings: Landings,
        recorder: Recorder,
        before: Calls,
        after_leaving: Calls,
        after: Calls,
        among_ranks: bool,
    ) -> None:
        """`before`: what waits for threads that use the session; `after_leaving`: once no rank is
        waited for; `after`: of what the session used; `among_ranks`: there are several."""
        self.among_ranks = among_ranks
        self._session, self._landings, self._recorder = session, landings, recorder
        self._before, self._after_leaving, self._after = before, after_leaving, after
        self._owner = os.getpid()
        self._leaves = self._gives_up = False

    @property
    def forked(self) -> bool:
        """A forked child has none of the threads that would be waited for."""
        return os.getpid() != self._owner

    def run(self, gives_up: bool = False) -> None:
        """Closes the session. `gives_up`: other ranks are told that this one ends, and not waited
        for."""
        if self.forked:
            return
        for wait in self._before:
            with contextlib.suppress(RuntimeError):  # this is the thread that it would wait for
                wait()
        with contextlib.suppress(RuntimeError):
            self._recorder.close()
        self._landings.close()
        self._leaves = True  # ahead of the look at what give_up() sets
        with contextlib.suppress(StrataError):  # the training ended with one already
            self._session.leave_ranks(gives_up=gives_up or self._gives_up)
        for end in self._after_leaving:
            end()
        self._session.close()
        for end in self._after:
            end()

    def give_up(self) -> None:
        """Where another thread waits for other ranks in run(), it goes on."""
        self._gives_up = True
        if self._leaves and not self.forked:
            give_up(self._session)
            self._session.close()


def give_up(session: _core.Session) -> None:
    """Other ranks need not wait for what this one will never do."""
    with contextlib.suppress(StrataError):  # the session may have ended with one
        session.leave_ranks(gives_up=True)


_any_before = False  # in this process, or in the one that it was forked from
_open: dict[object, tuple[Ending, weakref.ref[Any]]] = {}
_collected: dict[threading.Thread, Ending] = {}  # which these threads run


def close_behind(state: Any, ending: Ending) -> Callable[[], None]:
    """Runs it once: when `state` goes, at a call, or at the interpreter's exit. REQUIRES: nothing
    of it leads to `state`."""
    global _any_before
    _any_before = True
    key = object()

    def close() -> None:
        if (found := _open.pop(key, None)) is not None:
            found[0].run()

    _open[key] = (ending, weakref.ref(state, lambda _: _collect(key)))
    return close


def _collect(key: object) -> None:
    found = _open.pop(key, None)
    if found is None or found[0].forked:
        return
    ending = found[0]
    # One that Python did not start may be the session's own, in a call for it, and be waited for.
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    if not foreign and not ending.among_ranks:
        ending.run()
        return

    def run() -> None:
        try:
            ending.run()
        finally:
            _collected.pop(thread, None)

    # The interpreter's exit waits for it, below, and can give it up.
    thread = Thread(target=run, name="strata-close", daemon=True)
    _collected[thread] = ending
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends: there are no new ones
        del _collected[thread]
        _open[key] = found


def close_unreachable() -> None:
    """Returns when all sessions are closed whose models nobody can reach any more, and what else
    of strata's nobody can reach has given up its room and files."""
    if _any_before:  # a look at all that was imported takes longer than to wrap a small model
        gc.collect()
    for thread in list(_collected):
        thread.join(PATIENCE_S)
        if thread.is_alive():
            log.warning(
                "strata.wrap() waits for %.0f s until other ranks have dropped the model that they "
                "had wrapped before, too, or have called strata.unwrap()",
                PATIENCE_S,
            )
            thread.join()


@atexit.register  # of what is registered the last runs first: ahead of the door of _core's calls
def _close_open() -> None:
    # Where an exception ends the process, others need not wait for what it will never do.
    gives_up = hasattr(sys, "last_value")
    if gives_up:
        for ending in list(_collected.values()):
            ending.give_up()
    for key in list(_open):
        if (found := _open.pop(key, None)) is not None:
            found[0].run(gives_up)
    for thread in list(_collected):
        thread.join()
