"""Takes gradients to the core behind autograd's back: on a thread of its own, in order.

    lander = Lander(torch.device("cuda", 0))
    lander.put(land)         # land(stream) is called soon, by the lander's thread
    lander.wait()            # all of them are done; raises what one of them raised
    lander.close()

On a GPU the core waits until a gradient has been computed and copied, while autograd's thread has
kernels to launch. On the host gradients are there when autograd shows them: Inline lands them at
once, with the same methods.

Threads: any thread may call any method, but close() not while another one puts.

Note [Streams]. What lands next was computed on the stream that is current when it is put, and that
stream goes on to other kernels at once. So each of the SLOTS landings that may be on their way has
a stream of its own, which waits for what was computed so far and for nothing that comes later.

Note [What is bounded]. A gradient's memory is held until it has landed. put() waits while SLOTS of
them are under way: that is how far autograd runs ahead of the copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from .graphs import refuse_capture

SLOTS = 4

Landing = Callable[[int], None]  # given a stream, as cudaStream_t; 0 on the host


class Landings(Protocol):
    """What Inline and Lander have in common."""

    def put(self, landing: Landing) -> None:
        """Does it, behind all that were put before. Raises what an earlier one raised."""

    def wait(self) -> None:
        """Until all of them are done. Raises what one of them raised, once."""

    def close(self) -> None:
        """Drops what has not begun. Idempotent."""


class Inline:
    """Landings that happen at once, on the caller's thread."""

    def put(self, landing: Landing) -> None:
        """Does it."""
        landing(0)

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to drop."""


class Lander:
    """Landings on a thread of their own. Does not keep the model alive, but for what is under way.

    Invariants, under `_changed`:
    1. Slots are free, or in `_queue`, or one is being worked on: SLOTS in all.
    2. Behind a landing that raised nothing is worked on until somebody was told.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._changed = threading.Condition()
        self._free: list[torch.cuda.Stream | None] = [
            torch.cuda.Stream(device) if cuda else None for _ in range(SLOTS)
        ]
        self._queue: deque[tuple[Landing, torch.cuda.Stream | None]] = deque()
        self._working = False
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="strata-lander", daemon=True)
        self._thread.start()

    def put(self, landing: Landing) -> None:
        """Has it done behind all that were put before. Waits while SLOTS of them are under way.
        Raises StrataError where the current stream is captured."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._error or self._closed)
            self._raise()
            if self._closed:
                raise RuntimeError("a gradient came to a model that is not wrapped any more")
            stream = self._free[-1]
            if stream is not None:
                refuse_capture(self._device, "a backward of the model")
                stream.wait_stream(torch.cuda.current_stream(self._device))  # see Note [Streams]
            self._queue.append((landing, stream))
            self._free.pop()
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all of them are done."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._working) or self._error)
            self._raise()

    def close(self) -> None:
        """Drops what has not begun, and ends the thread."""
        with self._changed:
            self._closed = True
            self._drop()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _drop(self) -> None:
        while self._queue:
            self._free.append(self._queue.popleft()[1])

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            landing, stream = taken
            error: BaseException | None = None
            try:
                landing(0 if stream is None else stream.cuda_stream)
            except BaseException as raised:  # whoever comes next is told
                error = raised
            del landing, taken  # what it held is free before anybody hears that it is done
            with self._changed:
                self._working = False
                self._free.append(stream)
                if error is not None:
                    self._error = error
                    self._drop()
                self._changed.notify_all()
            del error

    def _take(self) -> tuple[Landing, torch.cuda.Stream | None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            self._working = True
            return self._queue.popleft()
