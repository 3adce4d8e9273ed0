"""Saved tensors that leave the device between a unit's forward and its backward.

    view = swapping.pack(tensor, unit, frame)    # None: the tensor has to be kept as it is
    ...                                          # device memory is freed as copies get done
    tensor = swapping.unpack(view)               # waits for the bytes, where they are not back yet

Use from the thread that trains; autograd's threads call it under the GIL.

Note [Storages]. What moves is a storage, once, whichever views of it autograd saves: they are made
again over the storage that came back. Of a storage much larger than the view only the part that the
view spans moves. A storage that lives on elsewhere (a buffer of the user's, the next unit's input)
is simply used again, without a fetch.

Note [Uses]. Forwards of units are numbered as they begin. What use n saved may be on its way out
until use n + 2 begins, which then waits: this bounds the memory beside what the plan keeps. When
backward comes to use n, the tensors of the `lookahead` uses before it begin to come back, and those
on the SSD of one more use are asked into host memory.
"""

import threading
import weakref
from collections import deque
from typing import Any

import torch

from .device import current_stream
from .swapped import State, Swapped, SwappedView, Visit
from .wrapped import Unit, Wrapped

SWAPS = frozenset(("swap_host", "swap_ssd"))
BYTES_MIN = 4096  # smaller ones stay: together they are little, and each would cost a copy
ALIGNMENT = 256  # kernels choose by it, so a part of a storage keeps what the storage had
USES_LEAVING = 2

_graph_task = torch._C._current_graph_task_id
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
        self._saves: set[int] = set()  # everything that the core holds
        self._by_storage: weakref.WeakValueDictionary[int, Swapped] = weakref.WeakValueDictionary()
        self._leaving: deque[Swapped] = deque()
        self._coming: deque[Swapped] = deque()
        self._wanted: list[weakref.ref[Swapped]] = []
        self._use = 0
        self._use_of: dict[int, int] = {}  # by unit: its last
        self._frame: Any = None  # the one that `_last` belongs to
        self._last: Visit | None = None
        self._arrived = _NOWHERE  # the use that backward has come to

    # Forward

    def open(self, unit: Unit) -> None:
        """A module's forward begins; `unit`: its own."""
        if not torch.is_grad_enabled():
            return
        if _graph_task() != -1:  # a recomputation
            self.arrive(unit)
            return
        if not self._saves:
            self._cut()
        self._use += 1
        self._use_of[unit.index] = self._use
        if self._leaving:
            with self._lock:
                self.poll()
                self._wait_for_older()

    def pack(self, tensor: torch.Tensor, unit: Unit, frame: object) -> SwappedView | None:
        """Begins to save a tensor for the unit. None: it has to be kept as it is.

        `frame`: an object of its own for each run of a module's forward.
        """
        if not self._may_leave(tensor):
            return None
        storage = tensor.untyped_storage()
        begin, end = _span(tensor)
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
                self._frame, self._last = frame, Visit(self._use, self._last)
            if record.visit is not self._last:
                record.visit = self._last
                self._last.records.append(weakref.ref(record))
            return SwappedView(tensor, self._hollow, record, self._last)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is a plain tensor on the device that nobody is known to keep there."""
        return (
            type(tensor) is torch.Tensor
            and tensor.nbytes >= BYTES_MIN
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and not (tensor.is_conj() or tensor.is_neg())
            and not (tensor.is_nested or tensor.is_quantized)
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
        to_ssd = unit.activation == "swap_ssd"
        address = storage.data_ptr() + begin
        stream = current_stream(self._device)
        save = self._session.save_activation(
            address, end - begin, to_ssd, unit.index, stream=stream
        )
        if save < 0:
            return None
        record = Swapped(self, storage, save)
        record.begin, record.end = begin, end
        record.to_ssd = to_ssd
        record.use = self._use
        self._saves.add(save)
        self._leaving.append(record)
        return record

    # Copies that get done

    def poll(self) -> None:
        """Lets go of what has been copied. Never waits."""
        if not self._leaving and not self._coming:
            return
        session = self._session
        with self._lock:
            while self._leaving and session.activation_saved(self._leaving[0].save, False):
                record = self._leaving.popleft()
                record.state = State.HERE
                self._settle(record)
            while self._coming:
                record = self._coming[0]
                if record.state is State.COMING:
                    if not session.activation_fetched(record.save, False):
                        break
                    record.state = State.HERE
                self._coming.popleft()
                self._settle(record)

    def drain(self) -> int:
        """Waits until nothing is under way. Returns how many storages are still saved."""
        with self._lock:
            for save in [record.save for record in self._leaving]:
                self._session.activation_saved(save, True)
            for save in [record.save for record in self._coming]:
                self._session.activation_fetched(save, True)
            self.poll()
        return len(self._saves)

    def forget(self, save: int) -> None:
        """Nobody will want it any more. REQUIRES: it is not under way."""
        self._saves.discard(save)
        self._session.drop_activation(save)

    def _wait_for_older(self) -> None:
        """Waits for what has had its time to leave, see Note [Uses]."""
        limit = self._use - USES_LEAVING
        late = [r for r in self._leaving if r.use <= limit and not r.wanted]
        if late:
            begin = self._recorder.now()
            for record in late:
                self._session.activation_saved(record.save, True)
            self.poll()
            self._recorder.pause(begin, self._recorder.now())

    @staticmethod
    def _settle(record: Swapped) -> None:
        """Frees device memory that no backward wants now."""
        if record.state is State.HERE and not record.wanted:
            record.storage = None
            record.state = State.AWAY

    # Backward

    def arrive(self, unit: Unit) -> None:
        """Backward comes to a unit: what is needed next begins to come back."""
        if self._last is None or _graph_task() == -1:
            return
        use = self._use_of.get(unit.index, _NOWHERE)
        if use < self._arrived:
            with self._lock:
                self._arrive(use, self._last)

    def unpack(self, view: SwappedView) -> torch.Tensor:
        """The tensor again. Waits for its bytes."""
        view.check()
        record, visit = view.record, view.visit
        with self._lock:
            if visit.use < self._arrived and _graph_task() != -1:
                self._arrive(visit.use, visit)
            return view.over(self._bring(record), record.base)

    def end(self) -> None:
        """The backward is over. Graphs that are kept keep their tensors in pages."""
        with self._lock:
            for wanted in self._wanted:
                record = wanted()
                if record is not None:
                    record.wanted = False
                    self._settle(record)
            self._wanted.clear()
            self._cut()

    def _arrive(self, use: int, visit: Visit | None) -> None:
        self._arrived = use
        self._use += 1
        nearest = use - self.lookahead
        while visit is not None and visit.use >= nearest - 1:
            for reference in reversed(visit.records):
                record = reference()
                if record is None or visit.use > use:
                    continue
                if visit.use >= nearest:
                    self._want(record)
                elif record.to_ssd and record.state is State.AWAY and not record.staged:
                    record.staged = True
                    self._session.stage_activation(record.save)
            visit = visit.previous
        self.poll()
        self._wait_for_older()

    def _want(self, record: Swapped) -> None:
        """Sees to it that the bytes are on the device soon, and stay until the backward ends."""
        if not record.wanted:
            record.wanted = True
            self._wanted.append(weakref.ref(record))
        if record.state is not State.AWAY:
            return
        alive = torch.UntypedStorage._new_with_weak_ptr(record.origin.cdata)
        if alive is not None and alive.nbytes() >= record.end:
            record.storage, record.base, record.state = alive, 0, State.HERE
            return
        storage = torch.UntypedStorage(record.end - record.begin, device=self._device)
        stream = current_stream(self._device)  # the memory may still be read there
        self._session.fetch_activation(record.save, storage.data_ptr(), stream=stream)
        record.storage, record.base, record.state = storage, record.begin, State.COMING
        record.staged = False
        self._coming.append(record)

    def _bring(self, record: Swapped) -> torch.UntypedStorage:
        self._want(record)
        if record.state is State.COMING:
            begin = self._recorder.now()
            self._session.activation_fetched(record.save, True)
            self._recorder.pause(begin, self._recorder.now())
            record.state = State.HERE
        assert record.storage is not None
        return record.storage

    def _cut(self) -> None:
        """What follows has nothing to do with the uses so far."""
        self._arrived = _NOWHERE
        self._use_of.clear()
        self._frame = self._last = None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches: from the first to behind the last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return begin, begin + int(tensor.nbytes)
    last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size
