"""Ends a session when nothing can reach its model any more, and at the interpreter's exit.

    close = close_behind(state, session, landings, recorder, before, after_leaving, after)
    close()                     # now; nothing the second time

Threads: Python may collect a model on any of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import _core  # ahead of what is registered below: see there
from .._errors import StrataError
from .lander import Landings

if TYPE_CHECKING:
    from .._profiling.recorder import Recorder

Calls = list[Callable[[], None]]

_open: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()


def close_behind(
    state: Any,
    session: _core.Session,
    landings: Landings,
    recorder: Recorder,
    before: Calls,
    after_leaving: Calls,
    after: Calls,
) -> Callable[[], Any]:
    """Closes the session when `state` goes, or at a call. `before`: what waits for threads that use
    the session; `after_leaving`: once no rank is waited for; `after`: of what the session used.
    REQUIRES: none of them leads to `state`."""
    _open[state] = weakref.finalize(
        state, _close, session, landings, recorder, os.getpid(), before, after_leaving, after
    )
    return _open[state]


@atexit.register  # of what is registered the last runs first: ahead of the door of _core's calls
def _close_open() -> None:
    for close in list(_open.values()):
        close()


def _close(
    session: _core.Session,
    landings: Landings,
    recorder: Recorder,
    owner: int,
    before: Calls,
    after_leaving: Calls,
    after: Calls,
) -> None:
    if os.getpid() != owner:  # a forked child has none of the threads that would be waited for
        return

    def close() -> None:
        for wait in before:
            with contextlib.suppress(RuntimeError):  # this is the thread that it would wait for
                wait()
        with contextlib.suppress(RuntimeError):
            recorder.close()
        landings.close()
        with contextlib.suppress(StrataError):  # the training ended with one already
            # Where an exception ends the process, others need not wait for what it will never do.
            session.leave_ranks(gives_up=hasattr(sys, "last_value"))
        for end in after_leaving:
            end()
        session.close()
        for end in after:
            end()

    # One that Python did not start may be the session's own, in a call for it, and be waited for.
    if not isinstance(threading.current_thread(), threading._DummyThread):
        close()
        return
    with contextlib.suppress(RuntimeError):  # the interpreter ends: there are no new ones
        threading.Thread(target=close, name="strata-close").start()
