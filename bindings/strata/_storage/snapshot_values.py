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
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._core import SavedPages, join_master, load_moments
from .checkpoint import raw_bytes
from .checkpoint_files import Record
from .snapshot_files import ROLES
from .snapshot_form import ALIGNMENT, ELEMENT_BYTES, MOMENT_BLOCK
from .snapshot_pages import pages_of
from .stored import StoredTensor

if TYPE_CHECKING:
    from .._core import DtypeName, TakenSnapshot

KEPT_BYTES = 32 << 20  # of pages, in memory
ROLES_OF = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


@dataclass(frozen=True)
class Forms:
    """As what values are stored, by parameter."""

    dtypes: Sequence[DtypeName]
    rules: Sequence[str]  # of moments
    moment_dtype: Literal["float32", "bfloat16", "block8"]


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
        self._scales = pages.scales
        self._forms = forms
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
        self._values = torch.empty(self._page_bytes, dtype=torch.float32)

    def read(self, tensor: StoredTensor, record: Record) -> Iterator[memoryview]:
        """Its bytes, in the dtype of the record. Raises StrataError for a damaged page."""
        for part in tensor.parts:
            for run in self._runs.get(part, []):
                for values in self._read_run(run, part, record["kind"]):
                    yield from raw_bytes(values.to(getattr(torch, record["dtype"])))

    def _read_run(self, run: _Run, part: int, kind: str) -> Iterator[torch.Tensor]:
        chunk, forms = run.chunk, self._forms
        # Within one page of every role.
        step = min(chunk[role][0] for role in ROLES if chunk[role] is not None)
        done = 0
        while done < run.count:
            at = run.at + done
            count = min(run.count - done, step - at % step)
            values = self._values[:count]
            if kind == "master":
                self._join(chunk, forms.dtypes[part], at, values)
            elif chunk[ROLES_OF[kind]] is None:
                values.zero_()
            else:
                self._moments(chunk, forms.rules[part], kind, at, values)
            yield values
            done += count

    def _join(self, chunk: dict[str, Any], dtype: DtypeName, at: int, values: torch.Tensor) -> None:
        param = self._bytes(chunk, "param", at, values.numel(), 4 if dtype == "float32" else 2)
        address = 0
        if chunk["residual"] is not None:
            size = 2 if dtype == "bfloat16" else 4
            residual = self._bytes(chunk, "residual", at, values.numel(), size)
            address = residual.data_ptr()
        join_master(dtype, param.data_ptr(), address, values.numel(), values.data_ptr())

    def _moments(
        self, chunk: dict[str, Any], rule: str, kind: str, at: int, values: torch.Tensor
    ) -> None:
        dtype, number = self._forms.moment_dtype, int(kind[-1])
        size = ELEMENT_BYTES[dtype]
        stored = self._bytes(chunk, ROLES_OF[kind], at, values.numel(), size)
        scales = 0
        if dtype == "block8":
            first = max(chunk["scales"][number - 1], 0) + at // MOMENT_BLOCK * 2
            page, first = divmod(first, self._page_bytes)
            scales = self._page(self._scales[page][0])[first:].data_ptr()
        load_moments(
            dtype, rule, number, stored.data_ptr(), scales, values.numel(), values.data_ptr()
        )

    def _bytes(
        self, chunk: dict[str, Any], role: str, at: int, count: int, size: int
    ) -> torch.Tensor:
        """Of elements of a role, which lie in one page."""
        per_page, begin, pages = chunk[role]
        page = pages[at // per_page]
        if page is None:
            return torch.zeros(count * size, dtype=torch.uint8)
        first = begin + at % per_page * size
        return self._page(page[0])[first : first + count * size]

    def _page(self, slot: int) -> torch.Tensor:
        if slot in self._kept:
            self._kept.move_to_end(slot)
            return self._kept[slot]
        size = self._page_bytes
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        page = memory[-memory.data_ptr() % ALIGNMENT :][:size]
        self._pages.read([slot], page.data_ptr())
        self._kept[slot] = page
        while len(self._kept) > max(2, KEPT_BYTES // size):
            self._kept.popitem(last=False)
        return page
