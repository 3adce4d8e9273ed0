"""The pace of a stream that nobody waits for: it leaves most of the disk to whoever trains.

    pace = Pace()
    for chunk in pace(chunks, flush): ...       # which is written, and has rests now and then
    pace.hurry()                                # from any thread: no rests from here on

Note [A third of the time]. What a stream takes of a disk is bounded by the time that it spends
there, whatever the disk: after every PACED_BYTES it rests twice as long as they took, so it is at
work for a third of the time at most, and training has the disk to itself for the rest. `flush` is
part of the work: what was only left to the kernel would reach the disk while the stream rests, all
at once. It also bounds the memory that is still to be written. A rest ends when somebody waits for
the stream, and there are none behind that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

PACED_BYTES = 16 << 20
REST_RATIO = 2.0  # of a rest to the work before it
REST_MAX_S = 10.0  # where the work took long because the process was stopped
LOOK_S = 0.5  # between two looks at whether whoever trains has ended


class Pace:
    """Of one stream. Used by one thread; hurry() by any."""

    def __init__(self, ended: Callable[[], bool] = lambda: False) -> None:
        """`ended`: whether whoever trains has ended, and so nobody is disturbed."""
        self._ended = ended
        self._hurry = threading.Event()
        self._bytes = 0  # since the last rest
        self._began = time.monotonic()
        self.rested_s = 0.0

    def hurry(self) -> None:
        """Somebody waits, or nobody trains meanwhile."""
        self._hurry.set()

    def __call__(
        self, chunks: Iterator[memoryview], flush: Callable[[], None] | None = None
    ) -> Iterator[memoryview]:
        """The chunks, with rests behind some of them. `flush`: waits until the disk has what was
        done with those before."""
        for chunk in chunks:
            yield chunk
            self._bytes += len(chunk)
            if self._bytes >= PACED_BYTES and not self._hurry.is_set():
                self._rest(flush)

    def _rest(self, flush: Callable[[], None] | None) -> None:
        if flush is not None:
            flush()
        begin = time.monotonic()
        end = begin + min(REST_RATIO * (begin - self._began), REST_MAX_S)
        while (left := end - time.monotonic()) > 0 and not self._hurry.wait(min(left, LOOK_S)):
            if self._ended():
                self.hurry()
        self._began = time.monotonic()
        self.rested_s += self._began - begin
        self._bytes = 0
