"""Values of a snapshot, tensor by tensor: read from the pages that it holds, and verified.

    values = SnapshotValues([Share(chunks, links)], session.page_layout(), forms, "auto")
    for chunk in values.read(tensor, record): ...        # bytes of the parameter, or of a moment

What the session says of a snapshot is described in snapshot_files.py. Use from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from .._core import SavedPages
from .._runtime.coded import KINDS
from .checkpoint import raw_bytes
from .checkpoint_files import CheckpointError, Record
from .snapshot_elements import Elements, Form, MomentDtype, slices
from .snapshot_pages import page_memory, slots_of
from .stored import StoredTensor

KEPT_BYTES = 32 << 20  # of pages, in memory
NUMBERS = {"master": 0, "moment1": 1, "moment2": 2}


@dataclass(frozen=True)
class Forms:
    """As what values are stored."""

    params: Sequence[Form]
    moment_dtype: MomentDtype


@dataclass(frozen=True)
class Share:
    """What one rank has of it; a process that is alone has all."""

    chunks: Sequence[dict[str, Any]]
    links: Sequence[str]  # a name of each page file


@dataclass(frozen=True)
class _Run:
    """Elements of a parameter that lie behind each other in a chunk."""

    first: int  # in the parameter
    count: int
    at: int  # in the chunk
    chunk: dict[str, Any]
    share: int


class SnapshotValues:
    """Memory used: a few pages."""

    def __init__(
        self, shares: Sequence[Share], page_bytes: int, forms: Forms, io_engine: str
    ) -> None:
        """`shares`: by rank."""
        self._page_bytes = page_bytes
        self._forms = forms.params
        self._elements = Elements(forms.moment_dtype, _fail)
        self._runs: dict[int, list[_Run]] = {}
        self._pages = []
        for number, share in enumerate(shares):
            for chunk in share.chunks:
                for part, first, count, at, *_ in chunk["runs"]:
                    self._runs.setdefault(part, []).append(_Run(first, count, at, chunk, number))
            slots = slots_of({"chunks": share.chunks, "page_bytes": page_bytes}, number)
            folders = [str(Path(link).parent.parent) for link in share.links]
            names = [str(Path(*Path(link).parts[-2:])) for link in share.links]
            pages = SavedPages(folders, names, page_bytes, slots, io_engine)
            self._pages.append(pages)
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.first)
        self._kept: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

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
                page = partial(self._page, run.share)
                for at, count in slices(run.chunk, run.at, run.count):
                    values = self._elements.read(run.chunk, page, number, form, at, count)
                    yield from raw_bytes(values.to(dtype))

    def _codes(self, part: int, kind: int) -> Iterator[memoryview]:
        stored = self._forms[part].stored
        assert stored is not None
        for run in self._runs.get(part, []):
            page = partial(self._page, run.share)
            found = self._elements.codes(run.chunk, page, stored, run.at, run.count)
            yield from raw_bytes(found[kind])

    def _page(self, share: int, slot: int) -> torch.Tensor:
        key = (share, slot)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        page = page_memory(self._page_bytes)
        self._pages[share].read([slot], page.data_ptr())
        self._kept[key] = page
        while len(self._kept) > max(2, KEPT_BYTES // self._page_bytes):
            self._kept.popitem(last=False)
        return page


def _fail(why: str) -> NoReturn:
    raise CheckpointError(f"the session holds a snapshot that contradicts itself: {why}")
