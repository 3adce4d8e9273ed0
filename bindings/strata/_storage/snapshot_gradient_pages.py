"""Pages of gradients of a snapshot, on their way to the ranks that own what lies in them now.

    pages = GradientPages(source, together)
    pages.copy(piece, dtype, owners, values)    # what this rank owns of a piece of a gradient
    pages.check()                               # behind the last one: raises what reading raised

Note [All ranks ask alike]. Of several machines a page may lie where its user cannot read it. Then
one rank reads it and sends it to all, and all have to expect it. So every rank makes the same calls
of copy(), in the same order, says which ranks use a page, and caches the same ones. A rank that
could not read one goes on to the end: others wait for what it reads for them, and for what it
lands, which may be anything, as no load comes of it.

Memory used: some pages. Use from one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .checkpoint import within
from .snapshot_files import GRAD

if TYPE_CHECKING:
    from .together import Together

CACHED_PAGES = 2  # one may have the gradients of many small parameters

Owners = list[tuple[int, int, int]]
"""Of a parameter: (rank, first element, count)."""


@dataclass(frozen=True)
class Piece:
    """What a run of a chunk has of a parameter's gradient."""

    chunk: dict[str, Any]
    run: list[Any]
    first: int  # element of the parameter
    count: int
    at: int  # in the chunk


class PageReader(Protocol):
    """Reads pages of a snapshot that is loaded."""

    def reader_for(self, users: set[int], rank: int) -> int | None:
        """The rank that reads for all what a rank had and these use; None: each for itself."""

    def page(self, slot: int, rank: int, reader: int | None, together: Together) -> torch.Tensor:
        """A page that a rank had, read and verified. All ranks call it, where one reads for all."""


class GradientPages:
    """Of one load. See above."""

    def __init__(self, source: PageReader, together: Together) -> None:
        """Nothing is read yet."""
        self._source, self._together = source, together
        # By rank, slot and reader. None: it was not read here, as others use it.
        self._cache: dict[tuple[int, int, int | None], torch.Tensor | None] = {}
        self._failed: BaseException | None = None

    def own(self, owners: Owners) -> list[tuple[int, int]]:
        """What this rank owns, as (first, count)."""
        return [(first, count) for rank, first, count in owners if rank == self._together.rank]

    def copy(self, piece: Piece, dtype: torch.dtype, owners: Owners, values: torch.Tensor) -> None:
        """What this rank owns of it, to the values of the parameter. `dtype`: of what is in pages;
        `owners`: of the parameter."""
        per_page, first_byte, pages = piece.chunk[GRAD]
        own, done = self.own(owners), 0
        while done < piece.count:
            number, in_page = divmod(piece.at + done, per_page)
            first, count = piece.first + done, min(piece.count - done, per_page - in_page)
            users = {r for r, begin, n in owners if begin < first + count and first < begin + n}
            page = self._page(int(piece.chunk.get("rank", 0)), pages[number][0], users)
            done += count
            if page is None:
                continue
            for begin, length in within(own, first, count):
                byte = first_byte + (in_page + begin - first) * dtype.itemsize
                raw = page[byte : byte + length * dtype.itemsize]
                values[begin : begin + length] = raw.view(dtype)

    def check(self) -> None:
        """Raises what the first page did that could not be read."""
        if self._failed is not None:
            raise self._failed

    def _page(self, rank: int, slot: int, users: set[int]) -> torch.Tensor | None:
        """None: others use it, or it could not be read."""
        reader = self._source.reader_for(users, rank)
        key = (rank, slot, reader)
        wanted = key not in self._cache
        if wanted:
            while len(self._cache) >= CACHED_PAGES:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = None
        if reader is None:
            wanted = self._together.rank in users and self._cache[key] is None
        if wanted:
            try:
                self._cache[key] = self._source.page(slot, rank, reader, self._together)
            except Exception as error:
                if self._together.count == 1:
                    raise
                self._failed = self._failed or error
        return self._cache[key]
