"""Ctrl-C that ends a run after what it is doing, and at once when pressed again.

with Interrupt(view.note) as interrupt:
    while not interrupt.requested: ...
"""

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt(AbstractContextManager["Interrupt"]):
    """`requested` becomes true at the first SIGINT or SIGTERM; a second raises KeyboardInterrupt.

    Signals stay as they are outside the main thread, where they are ignored, and where they have a
    handler that Python did not install, for it could not be put back.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is given what to show the user."""
        self.requested = False
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        """Takes the signals over."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = before
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._tell("stopping in a moment; press Ctrl-C again to stop at once")
