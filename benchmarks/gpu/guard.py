"""Runs a command, and leaves nothing of it behind: when the command has ended, or whoever asked
for it is gone, however that came, every process that it started is ended, those in sessions of
their own too. A GPU is free afterwards.

    python guard.py FD COMMAND...      # FD: a pipe whose other end is closed to end it

Exit status: the command's; 128 and the signal where one ended it; 127 where it cannot be started.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36  # sys/prctl.h: orphans of the command become children of this process
LOOK_SECONDS = 0.2
END_SECONDS = 10  # to end in when told to
NOT_STARTED, BY_SIGNAL = 127, 128


class EndSignals:
    """Whether a signal asked for the end."""

    def __init__(self) -> None:
        self.ended = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ended = True


def descendants(root: int) -> list[int]:
    """Every process below one, but for those that have ended and were not waited for."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            # The name, in brackets, may hold anything.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(stat.parent.name)] = int(parent)
    found: list[int] = []
    below = {root}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found += below
    return found


def end_all(seconds: float = END_SECONDS) -> None:
    """Ends every process below this one: asks, then kills."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
        until = time.monotonic() + patience
        signalled: set[int] = set()
        while left := descendants(os.getpid()):
            for process in set(left) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            signalled |= set(left)
            if time.monotonic() > until:
                break
            time.sleep(0.02)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def main(arguments: list[str]) -> int:
    """See the top of this file."""
    pipe, command = int(arguments[0]), arguments[1:]
    signals = EndSignals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error, file=sys.stderr)
        return NOT_STARTED
    while child.poll() is None and not signals.ended:
        if select.select([pipe], [], [], LOOK_SECONDS)[0]:  # closed: nobody writes into it
            break
    code = child.poll()
    end_all()
    if code is None:
        return BY_SIGNAL + signal.SIGTERM
    return code if code >= 0 else BY_SIGNAL - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
