"""Saved tensors that leave the device between a unit's forward and its backward.

    view = swapping.pack(tensor, unit, frame)    # None: the tensor has to be kept as it is
    ...                                          # device memory is freed as copies get done
    tensor = swapping.unpack(view)               # what computes with it waits for the bytes

Use from the thread that trains; autograd's threads call it under the GIL.

Note [Storages]. What moves is a storage, once, whichever views of it autograd saves: they are made
again over the storage that came back. Of a storage much larger than the view only the part that the
view spans moves. A storage that lives on elsewhere (a buffer of the user's, the next unit's input)
is simply used again, without a fetch.

Note [Uses]. Forwards of units are numbered as they begin. What use n saved may be on its way out
until use n + 2 begins, which then waits: this bounds the memory beside what the plan keeps. When
backward comes to use n, the tensors of the `lookahead` uses before it begin to come back, and those
of one more use begin to be read from the SSD into host memory.

Note [Streams]. On a GPU bytes that come back are put in order before the stream that asks for them;
Python goes on at once, unless they are still on the SSD, and may be far ahead of them.
    - Memory to come back to is allocated on the stream that is current, and the core's copy waits
      for what is on that stream so far. So the copy is behind whoever had the memory before.
    - A tensor that dies gives its memory to the next one of the stream it was allocated on, at
      once. That stream must be behind the copy: a flight refers to the memory until its own stream
      has been put in order, or the copy has been seen done. From then on the memory may die, before
      its copy has passed. So however far Python is ahead, it holds what it would hold behind.
    - Another stream may use it too: each unpack puts the stream that is current in order, and tells
      the allocator of one that is not the memory's own.
    - The core's pages are in use until the copy has been seen done; only then they are dropped.
      Where there is no room without them, pack() waits.
    - What leaves is kept until its copy has been seen done, so nobody can have it before.

Note [Ends]. Python's garbage collector may end a record on any thread and at any point, also within
the methods below. So a record that ends only leaves a note of its save. The notes are read where
the lock is held and nothing is half done. A signal handler may raise between any two bytecodes,
too. So a copy is noted before it begins, the call that asks the core also stores its answer
(_at_once), and drain() finds records that ended without a note.
"""

import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._config.choices import TO_SSD
from .._errors import StrataError
from .._runtime.streams import capturing, current_stream, keep_until_used, owned_by_graph
from .._runtime.unit import Unit
from .._runtime.wrapped import Wrapped
from .._torch_compat import graph_task, storage_of_weak
from .swapped import Flight, State, Stretch, Swapped, SwappedView, span

BYTES_MIN = 4096  # smaller ones stay: together they are little, and each would cost a copy
ALIGNMENT = 256  # kernels choose by it, so a part of a storage keeps what the storage had
USES_LEAVING = 2

_NOWHERE = 1 << 62


class Swapping:
    """The swapped tensors of one model."""

    def __init__(self, state: Wrapped) -> None:
        self.lookahead = 1  # uses; as the plan says
        self.kept_for_room = 0  # tensors that found none
        self._session = state.session
        self._recorder = state.recorder
        self._device = state.device
        self._hollow = torch.empty(0, device=self._device)
        # Held while states change: autograd may unpack on several threads, and waits let go of
        # the GIL.
        self._lock = threading.RLock()
        self._model = weakref.ref(state.model)
        self._staying: set[int] | None = None  # storages of buffers
        # Everything that the core holds, and who stands for it.
        self._saves: dict[int, weakref.ref[Swapped]] = {}
        self.forgotten: deque[int] = deque()  # saves whose record has ended; see Note [Ends]
        self._by_storage: weakref.WeakValueDictionary[int, Swapped] = weakref.WeakValueDictionary()
        self._leaving: deque[Swapped] = deque()
        self._coming: dict[int, Flight] = {}  # by save, the oldest first
        self._wanted: list[weakref.ref[Swapped]] = []
        self._use = 0
        self._use_of: dict[int, int] = {}  # by unit: its last
        self._frame: Any = None  # the one that `_last` belongs to
        self._last: Stretch | None = None
        self._arrived = _NOWHERE  # the use that backward has come to

    # Forward

    def open(self, unit: Unit) -> None:
        """A module's forward begins; `unit`: its own."""
        if not torch.is_grad_enabled():
            return
        if graph_task() != -1:  # a recomputation
            self.arrive(unit)
            return
        self.poll()
        if not self._saves:
            self._cut()
        self._use += 1
        self._use_of[unit.index] = self._use
        if self._leaving:
            with self._lock:
                self._wait_for_older()

    def pack(self, tensor: torch.Tensor, unit: Unit, frame: object) -> SwappedView | None:
        """Begins to save a tensor for the unit. None: it has to be kept as it is.

        `frame`: an object of its own for each run of a module's forward.
        """
        if not self._may_leave(tensor):
            return None
        storage = tensor.untyped_storage()
        begin, end = span(tensor)
        if end - begin < BYTES_MIN or end > storage.nbytes() or storage._cdata in self._stays():
            return None
        with self._lock:
            self.poll()
            record = self._by_storage.get(storage._cdata)
            if (
                record is None
                or record.version != tensor._version
                or not record.begin <= begin < end <= record.end
            ):
                record = self._start(storage, begin, end, unit)
                if record is None:
                    self.kept_for_room += 1
                    return None
                record.version = tensor._version
                self._by_storage[storage._cdata] = record
            if self._last is None or frame is not self._frame:
                self._frame, self._last = frame, Stretch(self._use, self._last)
            if record.stretch is not self._last:
                record.stretch = self._last
                self._last.records.append(weakref.ref(record))
            return SwappedView(tensor, self._hollow, record, self._last)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is a plain tensor on the device that nobody is known to keep there, and no
        CUDA graph: see streams.py."""
        return (
            type(tensor) is torch.Tensor
            and tensor.nbytes >= BYTES_MIN
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and not (tensor.is_conj() or tensor.is_neg())
            and not (tensor.is_nested or tensor.is_quantized)
            and not (owned_by_graph(tensor) or capturing(self._device))
        )

    def _stays(self) -> set[int]:
        if self._staying is None:
            model = self._model()
            buffers = [] if model is None else list(model.buffers())
            self._staying = {
                b.untyped_storage()._cdata for b in buffers if b.layout is torch.strided
            }
        return self._staying

    def _start(
        self, storage: torch.UntypedStorage, begin: int, end: int, unit: Unit
    ) -> Swapped | None:
        """Begins to copy the bytes, or the whole storage where that is not much more."""
        if 2 * (end - begin) >= storage.nbytes():
            begin, end = 0, storage.nbytes()
        begin -= begin % ALIGNMENT
        to_ssd = unit.activation in TO_SSD
        record = Swapped(self, storage)
        record.begin, record.end = begin, end
        record.to_ssd = to_ssd
        record.use = self._use
        self._leaving.append(record)
        place = (storage.data_ptr() + begin, end - begin, to_ssd, unit.index)
        save = partial(self._session.save_activation, *place, stream=current_stream(self._device))
        while True:
            self._drop_forgotten()
            _at_once(save, into=record.saves)
            if record.has_begun:
                self._saves[record.save] = weakref.ref(record)
                return record
            record.saves.clear()
            if not self._make_room():
                self._leaving.pop()
                return None

    # Copies that get done

    def poll(self) -> None:
        """Lets go of what has been copied. Never waits."""
        if not (self._leaving or self._coming or self.forgotten):
            return
        session = self._session
        with self._lock:
            while self._leaving and self._has_left(self._leaving[0]):
                self._leaving.popleft()
            while self._coming:
                flight = next(iter(self._coming.values()))
                if not session.activation_fetched(flight.save, False):
                    break
                self._land(flight)
            self._drop_forgotten()

    def _has_left(self, record: Swapped) -> bool:
        """Lets go of its memory, if its copy is done."""
        if not record.has_begun:
            return True
        self._saves.setdefault(record.save, weakref.ref(record))
        if not self._session.activation_saved(record.save, False):
            return False
        if record.state is State.LEAVING:
            record.state = State.HERE
        self._free_unwanted(record)
        return True

    def drain(self) -> int:
        """Waits until nothing is under way. Returns how many storages are still saved."""
        with self._lock:
            for save in [record.save for record in self._leaving if record.has_begun]:
                self._session.activation_saved(save, True)
            for save in list(self._coming):
                self._session.activation_fetched(save, True)
            self.poll()
            self.forgotten.extend(save for save, record in self._saves.items() if record() is None)
            self._drop_forgotten()
            return len(self._saves)

    def reset(self, backward_over: bool) -> None:
        """After an exception, whatever it came between."""
        self.drain()
        if backward_over:
            self.end()

    def _land(self, flight: Flight) -> None:
        """Its copy is done."""
        record = flight.record()
        if record is not None and record.state is State.COMING:
            record.state = State.HERE
            self._free_unwanted(record)
        del self._coming[flight.save]

    def _drop_forgotten(self) -> None:
        """Gives up what nobody will want any more. Never waits: what is coming is left to later.

        REQUIRES: the lock is held. A record that is leaving has not ended, see Swapped.
        """
        for _ in range(len(self.forgotten)):
            save = self.forgotten[0]
            record = self._saves.get(save)
            if record is not None and (save in self._coming or record() is not None):
                self.forgotten.append(save)
            elif record is not None:
                drop = partial(self._session.drop_activation, save)
                _at_once(drop, partial(self._saves.__delitem__, save))
            self.forgotten.popleft()

    def _make_room(self) -> bool:
        """Waits for the oldest copy that nobody wants behind it. False: there is none."""
        flight = next((f for f in self._coming.values() if f.record() is None), None)
        if flight is None:
            return False
        with self._recorder.paused():
            self._session.activation_fetched(flight.save, True)
        self._land(flight)
        return True

    def _wait_for_older(self) -> None:
        """Waits for what has had its time to leave, see Note [Uses]."""
        limit = self._use - USES_LEAVING
        late = [r for r in self._leaving if r.has_begun and r.use <= limit and not r.wanted]
        if late:
            with self._recorder.paused():
                for record in late:
                    self._session.activation_saved(record.save, True)
                self.poll()

    @staticmethod
    def _free_unwanted(record: Swapped) -> None:
        """Frees device memory that no backward wants now."""
        if record.state is State.HERE and not record.wanted:
            record.state = State.AWAY
            record.storage = record.stream = None

    # Backward

    def arrive(self, unit: Unit) -> None:
        """Backward comes to a unit: what is needed next begins to come back."""
        if self._last is None or graph_task() == -1:
            return
        use = self._use_of.get(unit.index, _NOWHERE)
        if use < self._arrived:
            with self._lock:
                self._arrive(use, self._last)

    def unpack(self, view: SwappedView) -> torch.Tensor:
        """The tensor again. What the current stream computes from here on sees its bytes."""
        view.check()
        record, stretch = view.record, view.stretch
        with self._lock:
            if stretch.use < self._arrived and graph_task() != -1:
                self._arrive(stretch.use, stretch)
            stream = current_stream(self._device)
            tensor = view.over(self._bring(record, stream), record.base)
            if record.stream not in (None, stream):
                keep_until_used(tensor, self._device)
            return tensor

    def end(self) -> None:
        """The backward is over. Graphs that are kept keep their tensors in pages."""
        with self._lock:
            self.poll()
            for wanted in self._wanted:
                record = wanted()
                if record is not None:
                    record.wanted = False
                    self._free_unwanted(record)
            self._wanted.clear()
            self._cut()

    def _arrive(self, use: int, stretch: Stretch | None) -> None:
        self._arrived = use
        self._use += 1
        nearest = use - self.lookahead
        while stretch is not None and stretch.use >= nearest - 1:
            for reference in reversed(stretch.records):
                record = reference()
                if record is None or stretch.use > use:
                    continue
                if stretch.use >= nearest:
                    self._want(record)
                elif record.to_ssd and record.state is State.AWAY and not record.staged:
                    record.staged = True
                    self._session.stage_activation(record.save)
            stretch = stretch.previous
        self.poll()
        self._wait_for_older()

    def _want(self, record: Swapped) -> None:
        """Sees to it that the bytes are on the device soon, and stay until the backward ends."""
        if not record.wanted:
            self._wanted.append(weakref.ref(record))
            record.wanted = True
        if record.state is not State.AWAY:
            return
        alive = storage_of_weak(record.origin.cdata)
        if alive is not None and alive.nbytes() >= record.end:
            record.storage, record.base, record.state = alive, 0, State.HERE
            return
        if record.save in self._coming:  # an exception came between: see Note [Ends]
            self._session.activation_fetched(record.save, True)
            self._land(self._coming[record.save])
        storage = torch.UntypedStorage(record.end - record.begin, device=self._device)
        stream = current_stream(self._device)  # the memory may still be read there
        self._coming[record.save] = Flight(record, storage, stream)
        try:
            self._session.fetch_activation(record.save, storage.data_ptr(), stream=stream)
        except StrataError:
            del self._coming[record.save]
            raise
        record.storage, record.base, record.stream = storage, record.begin, stream
        record.staged = False
        record.state = State.COMING

    def _bring(self, record: Swapped, stream: int) -> torch.UntypedStorage:
        self._want(record)
        storage = record.storage
        assert storage is not None
        if record.state is State.COMING:
            flight = self._coming[record.save]
            with self._recorder.paused():  # on a GPU it is the stream that waits
                there = self._session.await_activation(record.save, stream=stream)
            if there:
                self._land(flight)
            elif stream == flight.stream:
                flight.storage = None  # see Note [Streams]
        return storage

    def _cut(self) -> None:
        """Begins a new row of uses: what follows does not depend on those so far."""
        self._arrived = _NOWHERE
        self._use_of.clear()
        self._frame = self._last = None


def _at_once(*calls: Callable[[], Any], into: list[Any] | None = None) -> None:
    """Makes the calls, and stores what they return, with no bytecode in between."""
    results: list[Any] = [] if into is None else into
    results.extend(map(operator.call, calls))
