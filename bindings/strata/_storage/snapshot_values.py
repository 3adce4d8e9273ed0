"""Values of a snapshot, tensor by tensor: read from the pages that it holds, and verified.

    values = SnapshotValues(session.snapshot(number), forms, links, "auto")
    for chunk in values.read(tensor, record): ...        # bytes of the parameter, or of a moment

What the session says of a snapshot is described in snapshot_files.py. Use from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .._core import SavedPages
from .._runtime.coded import KINDS
from .checkpoint import raw_bytes
from .checkpoint_files import CheckpointError, Record
from .snapshot_elements import Elements, Form, MomentDtype, slices
from .snapshot_pages import page_memory, pages_of
from .stored import StoredTensor

if TYPE_CHECKING:
    from .._core import TakenSnapshot

KEPT_BYTES = 32 << 20  # of pages, in memory
NUMBERS = {"master": 0, "moment1": 1, "moment2": 2}


@dataclass(frozen=True)
class Forms:
    """As what values are stored."""

    params: Sequence[Form]
    moment_dtype: MomentDtype


@dataclass(frozen=True)
class _Run:
    """Elements of a parameter that lie behind each other in a chunk."""

    first: int  # in the parameter
    count: int
    at: int  # in the chunk
    chunk: dict[str, Any]


class SnapshotValues:
    """Memory used: a few pages."""

    def __init__(
        self, pages: TakenSnapshot, forms: Forms, links: list[str], io_engine: str
    ) -> None:
        """`pages`: as the session says; `links`: a name of each page file."""
        self._page_bytes = pages.page_bytes
        self._scale_pages = pages.scales
        self._forms = forms.params
        self._elements = Elements(forms.moment_dtype, self._scales, _fail)
        self._runs: dict[int, list[_Run]] = {}
        chunks = [pages.chunk(i) for i in range(pages.chunk_count)]
        for chunk in chunks:
            for part, first, count, at, *_ in chunk["runs"]:
                self._runs.setdefault(part, []).append(_Run(first, count, at, chunk))
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.first)
        slots = {
            s: (s, version, checksum)
            for s, version, checksum in pages_of({"chunks": chunks, "scales": pages.scales})
        }
        folders = [str(Path(link).parent.parent) for link in links]
        names = [str(Path(*Path(link).parts[-2:])) for link in links]
        self._pages = SavedPages(folders, names, self._page_bytes, list(slots.values()), io_engine)
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def read(self, tensor: StoredTensor, record: Record) -> Iterator[memoryview]:
        """Its bytes, in the dtype of the record. Raises StrataError for a damaged page."""
        if record["kind"] in KINDS:
            for part in tensor.parts:
                yield from self._codes(part, KINDS.index(record["kind"]))
            return
        number, dtype = NUMBERS[record["kind"]], getattr(torch, record["dtype"])
        for part in tensor.parts:
            form = self._forms[part]
            for run in self._runs.get(part, []):
                for at, count in slices(run.chunk, run.at, run.count):
                    values = self._elements.read(run.chunk, self._page, number, form, at, count)
                    yield from raw_bytes(values.to(dtype))

    def _codes(self, part: int, kind: int) -> Iterator[memoryview]:
        stored = self._forms[part].stored
        assert stored is not None
        for run in self._runs.get(part, []):
            found = self._elements.codes(run.chunk, self._page, stored, run.at, run.count)
            yield from raw_bytes(found[kind])

    def _scales(self, first: int, count: int) -> torch.Tensor:
        page, first = divmod(first, self._page_bytes)
        return self._page(self._scale_pages[page][0])[first : first + count]

    def _page(self, slot: int) -> torch.Tensor:
        if slot in self._kept:
            self._kept.move_to_end(slot)
            return self._kept[slot]
        page = page_memory(self._page_bytes)
        self._pages.read([slot], page.data_ptr())
        self._kept[slot] = page
        while len(self._kept) > max(2, KEPT_BYTES // self._page_bytes):
            self._kept.popitem(last=False)
        return page


def _fail(why: str) -> NoReturn:
    raise CheckpointError(f"the session holds a snapshot that contradicts itself: {why}")
