"""The pages of a snapshot that is loaded: what they must be, who reads them, and the way of what is
in them to wherever the model has it now.

    source = Source(manifest, folder, state)            # raises CheckpointError
    source.find_pages(together)
    source.restore(state, meter, together)              # each rank what it owns

The format is described in format.py: everything in the manifest is held against it, and
against the model, before anything is changed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..._config.threads import Pool
from ..._errors import StrataError
from ..._optim.groups import moments_of
from ..._runtime import coded
from ..._runtime.wrapped import Wrapped
from .. import checkpoint
from ..checkpoint import Meter
from ..checkpoint_files import CheckpointError, Record, TensorReader
from ..checkpoint_manifest import another, check_cuts, misfits
from ..stored import StoredTensor, stored_tensors
from ..together import Together, owned
from .check import check_chunks, check_form, cuts_of, roles_of
from .elements import SLICE_ELEMENTS, Chunk, Elements, Form, slices
from .format import drives_by_rank
from .pages import page_memory, saved_pages

if TYPE_CHECKING:
    from ..._core import Kind, SavedPages, StoredName

READ_BYTES = 16 << 20  # at least, so that the disk has work until the next read begins
READS_AHEAD = 2

Pages = dict[int, torch.Tensor]
"""By slot."""


@dataclass
class _Run:
    """Elements of a tensor that lie behind each other in a chunk."""

    part: int
    first: int  # in the part
    count: int
    at: int  # in the chunk, or in what comes from it


class Source:
    """A snapshot's pages, as a manifest that fits the model names them."""

    def __init__(self, manifest: dict[str, Any], folder: Path, state: Wrapped) -> None:
        """Raises CheckpointError where the manifest contradicts itself or the model. REQUIRES: it
        is one of read_snapshot()."""
        self.manifest = manifest
        self.tensors = stored_tensors(state.model)
        self._where = str(folder)
        self._check(state)
        self._chunks = manifest["chunks"]
        self._page_bytes = manifest["page_bytes"]
        self.bytes = self._state_bytes(self._chunks)
        self._owned = _owned(state)
        self._folder, self._engine = folder, state.config["io_engine"]
        self._pages: dict[int, SavedPages] = {}  # by rank that had them, where they are reached
        self._readers: dict[int, int] = {}  # likewise: who reads for all; none: each for itself
        self._others = torch.empty(SLICE_ELEMENTS, dtype=torch.float32)  # nobody reads them
        self._elements = Elements(manifest["moment_dtype"], self._fail)
        self.scales = self._elements.scales
        self._scale_page: Pages = {}  # the last one that was read alone
        self._reading = threading.Lock()  # the next chunks, or scales

    def _fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._where} is a damaged snapshot: {why}")

    def _check(self, state: Wrapped) -> None:
        manifest = self.manifest
        check_form(manifest, self._fail)
        wanted = checkpoint.wanted_of(state)
        if problems := misfits(manifest, wanted):
            told = another(manifest, wanted, "; ".join(problems[:4]))
            raise CheckpointError(f"{self._where} {told}")
        check_chunks(manifest, self.tensors, self._fail)
        check_cuts(cuts_of(manifest, self.tensors), wanted["params"], self._where)

    def find_pages(self, together: Together) -> None:
        """Opens the page files that can be reached. All ranks call it. Raises CheckpointError."""
        manifest, folder = self.manifest, self._folder
        ranks = range(len(drives_by_rank(manifest)))
        reached = [r for r in ranks if self._readers.get(r, together.rank) == together.rank]
        with together.phase():
            try:
                opened = [saved_pages(manifest, folder, rank, self._engine) for rank in reached]
            except (StrataError, TypeError, ValueError) as error:
                raise CheckpointError(f"the pages of {folder} cannot be read: {error}") from error
        self._pages = dict(zip(reached, opened, strict=True))

    def restore(self, state: Wrapped, meter: Meter, together: Together) -> None:
        """Writes everything to the session. What comes next is read meanwhile. Where a rank reads
        for others, one that fails goes on with that to the end."""
        kinds = [moments_of(group) for group in state.config["groups"]]
        batches, failed = self._batches(), None
        free = [torch.empty(0, dtype=torch.uint8)] * (READS_AHEAD + 1)
        ahead: deque[tuple[list[Chunk], Future[tuple[torch.Tensor, Pages]]]] = deque()
        with Pool("strata-load") as pool:
            while True:
                while free and (batch := next(batches, None)) is not None:
                    ahead.append((batch, pool.submit(self._read, batch, free.pop())))
                if not ahead:
                    break
                batch, reading = ahead.popleft()
                memory = torch.empty(0, dtype=torch.uint8)
                try:
                    memory, pages = self._received(batch, reading, together)
                    meter.add(self._state_bytes(batch))
                    if failed is None:
                        self._restore_batch(state, batch, pages, kinds)
                except BaseException as error:
                    if not self._readers:
                        raise
                    failed = failed or error
                free.append(memory)
        if failed is not None:
            raise failed

    def _received(
        self, batch: list[Chunk], reading: Future[tuple[torch.Tensor, Pages]], together: Together
    ) -> tuple[torch.Tensor, Pages]:
        """As _read(), whose result it is, also where another rank has read."""
        failed = reading.exception()
        memory, pages = reading.result() if failed is None else (torch.empty(0), Pages())
        size = len(pages) * self._page_bytes
        _pass_on(memory[:size], self._readers.get(_rank_of(batch)), failed, together)
        return memory, pages

    def _restore_batch(
        self, state: Wrapped, batch: list[Chunk], pages: Pages, kinds: list[Any]
    ) -> None:
        for chunk in batch:
            for run in chunk["runs"]:
                self._restore_run(state, chunk, pages, _Run(*run[:4]), kinds)

    def _batches(self) -> Iterator[list[Chunk]]:
        """All chunks, in lists that are worth a read, each of one rank's."""
        batch: list[Chunk] = []
        for chunk in self._chunks:
            if batch and _rank_of(batch) != _rank_of([chunk]):
                yield batch
                batch = []
            batch.append(chunk)
            if self._state_bytes(batch) >= READ_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch

    def _state_bytes(self, chunks: list[Chunk]) -> int:
        """Of the pages of their state, without scales."""
        return sum(len(_state_slots(chunk)) for chunk in chunks) * self._page_bytes

    def _read(self, batch: list[Chunk], memory: torch.Tensor) -> tuple[torch.Tensor, Pages]:
        """Pages of chunks, by slot, in the memory, or in more of it where it does not suffice. New
        memory would have to be cleared by the kernel each time."""
        rank = _rank_of(batch)
        wanted = [c for c in batch if rank in self._readers or any(map(self._is_mine, c["runs"]))]
        slots = list(dict.fromkeys(slot for chunk in wanted for slot in _slots(chunk)))
        size = len(slots) * self._page_bytes
        if memory.numel() < size:
            memory = page_memory(size)
        return memory, self._read_to(slots, memory, rank)

    def _read_to(self, slots: list[int], memory: torch.Tensor, rank: int) -> Pages:
        """The memory's pages. `rank`: whose they were; what another one reads comes later."""
        if rank in self._pages:
            with self._reading:
                self._pages[rank].read(slots, memory.data_ptr())
        size = self._page_bytes
        return {s: memory[i * size :][:size] for i, s in enumerate(slots)}

    def _is_mine(self, run: list[Any]) -> bool:
        """Whether this rank owns any of it. Codes are read by all ranks, whoever owns them."""
        if "stored" in self.manifest["params"][self.manifest["parts"][run[0]][0]]:
            return True
        return any(True for _ in self._owned_of(run[0], run[1], run[2]))

    def _owned_of(self, part: int, first: int, count: int) -> Iterator[tuple[int, int]]:
        """What this rank owns of elements of a part: in their tensor, as (first, count)."""
        place, begin = self.manifest["parts"][part]
        return checkpoint.within(self._owned[place], begin + first, count)

    def _restore_run(
        self, state: Wrapped, chunk: Chunk, pages: Pages, run: _Run, kinds: list[Any]
    ) -> None:
        place = self.manifest["parts"][run.part][0]
        entry = self.manifest["params"][place]
        if "stored" in entry:
            self._restore_codes(state, chunk, pages, run, entry["stored"])
            return
        group = state.config["params"][self.tensors[place].parts[0]]["group"]
        moments = len(kinds[group]) if entry["trainable"] else 0
        form = Form(entry["dtype"], entry["rule"])
        for at, count in slices(chunk, run.at, run.count):
            first = run.first + at - run.at
            mine = any(True for _ in self._owned_of(run.part, first, count))
            for number in range(moments + 1):
                read = self._elements.read
                # All ranks make the same calls of write(), and the core takes what a rank owns.
                values = self._others[:count]
                if mine:
                    values = read(chunk, pages.__getitem__, number, form, at, count)
                self._write(state, run, at - run.at, number, values)

    def _restore_codes(
        self, state: Wrapped, chunk: Chunk, pages: Pages, run: _Run, form: StoredName
    ) -> None:
        place, begin = self.manifest["parts"][run.part]
        tensor = self.tensors[place]
        stored = self._elements.codes(chunk, pages.__getitem__, form, run.at, run.count)
        for to in _split(tensor, begin + run.first, run.count):
            coded.write(state, to.part, coded.piece(form, stored, to.at, to.count), to.first)

    def restore_steps(self, state: Wrapped) -> None:
        """Tells the session which elements have had another number of updates than the most of
        their parameter, as LockFree may leave them. REQUIRES: it knows those of parameters."""
        for chunk in self._chunks:
            for part, first, count, _, step in chunk["runs"]:
                place, begin = self.manifest["parts"][part]
                if step == self.manifest["params"][place]["step"]:
                    continue
                for to in _split(self.tensors[place], begin + first, count):
                    if state.config["params"][to.part]["trainable"]:
                        state.session.restore_run(to.part, to.first, to.count, step)

    def scales_alone(self, chunk: Chunk, moment: int, elements: int) -> torch.Tensor:
        """Of a chunk of this rank's, whose other pages are not read. Valid until the next ones."""

        def page(slot: int) -> torch.Tensor:
            if slot not in self._scale_page:
                memory = page_memory(self._page_bytes)
                self._scale_page = self._read_to([slot], memory, _rank_of([chunk]))
            return self._scale_page[slot]

        return self.scales(chunk, page, moment, 0, elements)

    def _write(
        self, state: Wrapped, run: _Run, done: int, number: int, values: torch.Tensor
    ) -> None:
        place, begin = self.manifest["parts"][run.part]
        kinds: tuple[Kind, Kind, Kind] = ("master", "moment1", "moment2")
        for to in _split(self.tensors[place], begin + run.first + done, values.numel()):
            piece = values[to.at : to.at + to.count]
            state.session.write(to.part, kinds[number], to.first, piece.data_ptr(), to.count)


def _owned(state: Wrapped) -> list[list[tuple[int, int]]]:
    """By tensor: what this rank owns of its elements, as (first, count)."""
    rank = state.ranks.rank if state.ranks is not None else 0
    found = []
    for tensor in stored_tensors(state.model):
        runs, begin = [], 0
        for part, numel in zip(tensor.parts, tensor.part_numels, strict=True):
            runs += [(begin + first, count) for first, count in owned(state, part, rank)]
            begin += numel
        found.append(runs)
    return found


def _pass_on(
    memory: torch.Tensor, reader: int | None, failed: BaseException | None, together: Together
) -> None:
    """What this rank has read stays, or becomes what the one that reads for all has. Raises
    `failed`, which this rank's reading did."""
    if reader is not None:
        together.pass_on(memory, reader, failed)
    elif failed is not None:
        raise failed


def _rank_of(batch: list[Chunk]) -> int:
    """The one that had its pages."""
    return int(batch[0].get("rank", 0))


def _state_slots(chunk: Chunk) -> list[int]:
    return [p[0] for role in roles_of(chunk) for p in chunk[role][2] if p is not None]


def _slots(chunk: Chunk) -> list[int]:
    """Of the pages that its values are in, with scales."""
    scales = chunk["scale_page"]
    return _state_slots(chunk) + ([] if scales is None else [scales[0]])


def _split(tensor: StoredTensor, first: int, count: int) -> Iterator[_Run]:
    """Of so many elements of a tensor, from `first` on, those that each parameter has; `at` counts
    from `first`."""
    end = 0
    for part, numel in zip(tensor.parts, tensor.part_numels, strict=True):
        begin, end = end, end + numel
        low, high = max(first, begin), min(first + count, end)
        if low < high:
            yield _Run(part, low - begin, high - low, low - first)


def read_tensor(file: TensorReader, record: Record) -> torch.Tensor:
    """A tensor of state.bin."""
    raw = bytearray().join(bytes(chunk) for chunk in file.chunks(record))
    dtype = getattr(torch, record["dtype"])
    if not raw:
        return torch.empty(record["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(record["shape"])
