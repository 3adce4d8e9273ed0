"""Threads of strata's own. They have names, and take no signals (see memory/thread.hpp): those are
for the program's threads, one of which may wait for them, in sigwait() or a system call.

    thread = Thread(target=run, name="strata-lander")     # in the place of threading.Thread
    pool = Pool("strata-save")                            # an executor with one thread
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A thread that is started meanwhile inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Thread(threading.Thread):
    """One that takes no signals."""

    def start(self) -> None:
        """Raises RuntimeError where there is none left."""
        with _signals_blocked():
            super().start()


class Pool(ThreadPoolExecutor):
    """An executor whose one thread takes no signals."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first call."""
        super().__init__(1, name)

    def submit(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Queues a call."""
        with _signals_blocked():
            return super().submit(call, *args, **kwargs)
