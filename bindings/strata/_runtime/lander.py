"""Takes gradients to the core behind autograd's back: on a thread of its own, in order.

    lander = Lander(torch.device("cuda", 0), ahead_of(24 << 30))
    lander.put(land, grad.nbytes)    # land(stream) is called soon, by the lander's thread
    lander.wait()            # all of them are done; raises what one of them raised
    lander.close()

On a GPU the core waits until a gradient has been computed and copied, while autograd's thread has
kernels to launch. On the host gradients are there when autograd shows them: Inline lands them at
once, with the same methods.

Threads: any thread may call any method, but close() not while another one puts.

Note [Streams]. What lands next was computed on the stream that is current when it is put, and that
stream goes on to other kernels at once. So landings have a stream of their own. One is enough, as
they come in turn: before each the stream waits for the event that was recorded when it was put, and
so for what was computed by then and for nothing that comes later.

Note [What is bounded]. A gradient's memory is held until it has landed, so put() waits while more
than `ahead_bytes` would be on their way: that is how far autograd runs ahead of the copies, and
plans count as many bytes beside what a step held where nothing was under way (trace_of.py). A
gradient that is larger by itself is waited for at once. The bound is a share of the device budget:
two gradients of a large matrix of the model that it is for, one of which lands while the next is
ready. The core hears of a copy's end and has the next one submitted within some 80 µs (a look every
50 µs at most, two threads to wake, 10 µs each, and 10 µs to submit), in which a link of 55 GB/s
moves 4.4 MB: small ones keep the link busy however many there are.

Note [Signals]. A signal handler may raise wherever Python code runs: within threading.Condition
too, whose lock would stay taken for ever. What waits here are objects of C, which it cannot divide.
"""

from __future__ import annotations

import threading
from _thread import LockType
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch

from .._config.threads import Thread
from .streams import refuse_capture

AHEAD_SHARE = 32  # one part in so many of the device budget
PATIENCE_S = 1.0  # between looks at a thread that may have ended

Landing = Callable[[int], None]  # given a stream, as cudaStream_t; 0 on the host


class _UnderWay:
    """A landing that may not be done, and what it holds."""

    def __init__(self, byte_count: int, index: int) -> None:
        self.bytes = byte_count
        self.index = index
        self.done = False
        self.ends = threading.Lock()  # released when it is done
        self.ends.acquire()


class Inline:
    """Landings that happen at once, on the caller's thread."""

    ahead_bytes = 0

    def put(self, landing: Landing, byte_count: int = 0, index: int = -1) -> None:
        """Does it."""
        landing(0)

    def has(self, index: int) -> bool:
        """Nothing is under way."""
        return False

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to drop."""


def ahead_of(device_bytes: int) -> int:
    """Bytes of gradients that may be under way beside a device budget."""
    return device_bytes // AHEAD_SHARE


class Lander:
    """Landings on a thread of their own. Does not keep the model alive, but for what is under way.

    Invariants:
    1. `_under_way` has every landing that is not done, oldest first, and some that are.
    2. Behind a landing that raised nothing is worked on until somebody was told: what was put
       before is of an older `_epoch`.
    """

    def __init__(self, device: torch.device, ahead_bytes: int) -> None:
        cuda = device.type == "cuda"
        self.ahead_bytes = ahead_bytes
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._under_way: deque[_UnderWay] = deque()
        # Landings with their epoch, and what the stream waits for; locks that wait() waits for;
        # None: the end.
        self._queue: SimpleQueue[
            tuple[Landing, int, torch.cuda.Event | None, _UnderWay] | LockType | None
        ] = SimpleQueue()
        self._epoch = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._run, name="strata-lander", daemon=True)
        self._thread.start()

    def put(self, landing: Landing, byte_count: int = 0, index: int = -1) -> None:
        """Queues a landing behind those put before. Waits while too many bytes are under way, or
        would be; `byte_count`: what it holds until it is done; `index`: of the parameter whose
        gradient it is, if any. Raises what an earlier one raised, and StrataError where the current
        stream is captured."""
        while not self._closed and (oldest := self._in_the_way(byte_count)) is not None:
            oldest.ends.acquire(timeout=PATIENCE_S)
        self._raise()
        if self._closed:
            raise RuntimeError("a gradient came to a model that is not wrapped any more")
        computed = None
        if self._stream is not None:
            refuse_capture(self._device, "a backward of the model")
            computed = torch.cuda.Event()  # see Note [Streams]
            computed.record(torch.cuda.current_stream(self._device))
        under_way = _UnderWay(byte_count, index)
        self._queue.put((landing, self._epoch, computed, under_way))
        self._under_way.append(under_way)
        while byte_count > self.ahead_bytes and not (under_way.done or self._closed):
            under_way.ends.acquire(timeout=PATIENCE_S)

    def has(self, index: int) -> bool:
        """Whether a gradient of the parameter is under way."""
        return any(one.index == index and not one.done for one in self._under_way.copy())

    def wait(self) -> None:
        """Waits until all of them are done. Raises what one of them raised, once."""
        if threading.current_thread() is self._thread:
            return
        done = threading.Lock()
        done.acquire()
        self._queue.put(done)
        while not done.acquire(timeout=PATIENCE_S) and self._thread.is_alive():
            pass
        self._raise()

    def close(self) -> None:
        """Drops what has not begun, and ends the thread."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _in_the_way(self, byte_count: int) -> _UnderWay | None:
        """The landing to wait for before so many more bytes may be under way; None: there is
        none."""
        for one in self._under_way.copy():
            if not one.done:
                break
            with suppress(ValueError):  # another thread did
                self._under_way.remove(one)
        held = [one for one in self._under_way.copy() if one.bytes and not one.done]
        more = sum(one.bytes for one in held) + byte_count > self.ahead_bytes
        return held[0] if byte_count and more and held else None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if not isinstance(item, tuple):
                item.release()
                continue
            landing, epoch, computed, under_way = item
            error: BaseException | None = None
            if epoch == self._epoch and not self._closed:
                try:
                    if self._stream is not None and computed is not None:
                        self._stream.wait_event(computed)
                    landing(0 if self._stream is None else self._stream.cuda_stream)
                except BaseException as raised:  # whoever comes next is told
                    error = raised
            del landing, computed, item  # what it held is free before anybody hears that it is done
            if error is not None:
                self._epoch += 1
                self._error = error
            del error
            under_way.done = True
            under_way.ends.release()


Landings = Inline | Lander
