"""A child that os.fork() made of a process which trains: it has no part of the session.

    watch(state)    # from now on a child of this process is refused wherever it uses the model

The child has the model's objects, but none of the threads that move pages, and the files, locks and
the GPU belong to the parent. So what its objects lead to is exchanged there, once, for one that
raises. That costs the parent nothing. Workers of a DataLoader, which carry the model and do not
touch it, never notice. Threads: any.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from .._errors import StrataError

if TYPE_CHECKING:
    from .wrapped import Wrapped


class Elsewhere:
    """Stands for what another process has. Everything about it raises StrataError."""

    def __init__(self, owner: int) -> None:
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> NoReturn:
        raise StrataError(
            f"this model was wrapped in process {self._owner}, and a forked child cannot use it: "
            "the pages, and the threads that move them, are the parent's. Use the model there, or "
            "start processes by the 'spawn' method and wrap a model in them"
        )


def watch(state: Wrapped) -> None:
    """Has a forked child refuse to use the model."""
    _watched().add(state)


@functools.cache
def _watched() -> weakref.WeakSet[Wrapped]:
    states: weakref.WeakSet[Wrapped] = weakref.WeakSet()
    owner = [os.getpid()]

    def in_child() -> None:
        elsewhere: Any = Elsewhere(owner[0])
        for state in states:
            _give_up(state, elsewhere)
        states.clear()
        owner[0] = os.getpid()

    os.register_at_fork(after_in_child=in_child)
    return states


def _give_up(state: Wrapped, elsewhere: Any) -> None:
    state.session = state.landings = state.device = elsewhere
    state.visits.renew_lock()
    if state.hooks is not None:
        swapping = state.hooks.swapping
        swapping._session = elsewhere
        swapping._lock = threading.RLock()  # another thread of the parent's may have had it
