"""Elements of a snapshot as float32, whatever they are stored as in its pages.

    elements = Elements(moment_dtype, fail)
    for at, count in slices(chunk, run_at, run_count):
        values = elements.read(chunk, page, number, form, at, count)    # valid until the next ones

`chunk` is one as format.py describes it, and `page` gives the page in a slot. Number 0 is
the master, 1 and 2 are the moments. Use from one thread.

Note [Slices]. Values pass through memory of their own on the way from their pages to where they go.
A slice of that is small enough to stay in the cache meanwhile, and large enough that what is done
once for it does not count. Where pages hold float32, they are the values, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from ..._core import join_master, load_moments, packing
from ..._runtime import coded
from .check import roles_of
from .format import ELEMENT_BYTES, MOMENT_BLOCK, ROLES

if TYPE_CHECKING:
    from ..._core import DtypeName, StoredName

SLICE_ELEMENTS = 1 << 16

Chunk = dict[str, Any]
MomentDtype = Literal["float32", "bfloat16", "block8"]
Page = Callable[[int], torch.Tensor]
"""The bytes of the page in a slot."""


@dataclass(frozen=True)
class Form:
    """As what the values of a parameter are stored."""

    dtype: DtypeName
    rule: str  # of its moments
    stored: StoredName | None = None  # where they rest as codes


def slices(chunk: Chunk, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Elements of a chunk, from one on, in pieces that lie in one page of every role each. All but
    the first begin with a block of scales, where pages do."""
    in_page = min(chunk[role][0] for role in roles_of(chunk))
    end = at + count
    while at < end:
        here = at % in_page
        size = min(end - at, in_page - here, SLICE_ELEMENTS - here % SLICE_ELEMENTS)
        yield at, size
        at += size


class Elements:
    """Of one snapshot. Memory used: a slice."""

    def __init__(self, moment_dtype: MomentDtype, fail: Callable[[str], NoReturn]) -> None:
        """`fail(why)` raises: the snapshot contradicts itself."""
        self._moment_dtype: MomentDtype = moment_dtype
        self._fail = fail
        self._values = torch.empty(SLICE_ELEMENTS, dtype=torch.float32)

    def read(
        self, chunk: Chunk, page: Page, number: int, form: Form, at: int, count: int
    ) -> torch.Tensor:
        """The values of a slice. Raises what `page` and `fail` do."""
        values = self._values[:count]
        if number == 0:
            return self._master(chunk, page, form.dtype, at, values)
        if chunk[ROLES[1 + number]] is None:
            return values.zero_()
        return self._moment(chunk, page, form.rule, number, at, values)

    def _master(
        self, chunk: Chunk, page: Page, dtype: DtypeName, at: int, values: torch.Tensor
    ) -> torch.Tensor:
        count = values.numel()
        param = self._bytes(chunk, page, "param", at, count, 4 if dtype == "float32" else 2)
        residual = None
        if chunk["residual"] is not None:
            size = 2 if dtype == "bfloat16" else 4
            residual = self._bytes(chunk, page, "residual", at, count, size)
        elif dtype == "float32" and _is_aligned(param):
            return param.view(torch.float32)
        address = 0 if residual is None else residual.data_ptr()
        join_master(dtype, param.data_ptr(), address, count, values.data_ptr())
        return values

    def codes(
        self, chunk: Chunk, page: Page, stored: StoredName, at: int, count: int
    ) -> list[torch.Tensor]:
        """Codes and scales of elements, as coded.kinds() lists them, where their page has them."""
        per_page, _, found = chunk["param"]
        place = found[at // per_page]
        if place is None:  # nobody wrote it
            return [
                torch.zeros(n, dtype=getattr(torch, dtype))
                for _, dtype, n in coded.kinds(stored, count)
            ]
        stored_page = page(place[0])
        if per_page != packing(stored, stored_page.numel())[0] or at + count > per_page:
            self._fail("codes reach beyond their page")
        return coded.in_page(stored_page, stored, at, count)

    def _moment(
        self, chunk: Chunk, page: Page, rule: str, number: int, at: int, values: torch.Tensor
    ) -> torch.Tensor:
        dtype, count = self._moment_dtype, values.numel()
        stored = self._bytes(chunk, page, ROLES[1 + number], at, count, ELEMENT_BYTES[dtype])
        if dtype == "float32" and _is_aligned(stored):
            return stored.view(torch.float32)
        scales = None
        if dtype == "block8":
            scales = self.scales(chunk, page, number - 1, at, count)
        address = 0 if scales is None else scales.data_ptr()
        load_moments(dtype, rule, number, stored.data_ptr(), address, count, values.data_ptr())
        return values

    def scales(self, chunk: Chunk, page: Page, moment: int, at: int, count: int) -> torch.Tensor:
        """Those of elements of a moment: bytes of the page that has them."""
        held, size = chunk["scale_page"], 2 * -(-count // MOMENT_BLOCK)
        found = None if held is None else page(held[0])
        first = chunk["scales"][moment] + at // MOMENT_BLOCK * 2
        if found is None or at % MOMENT_BLOCK or first + size > found.numel():
            self._fail("scales are missing")
        return found[first : first + size]

    def _bytes(
        self, chunk: Chunk, page: Page, role: str, at: int, count: int, size: int
    ) -> torch.Tensor:
        """Of elements of a role, which lie in one page."""
        per_page, begin, found = chunk[role]
        place = found[at // per_page]
        if place is None:  # nobody wrote it
            return torch.zeros(count * size, dtype=torch.uint8)
        first = begin + at % per_page * size
        result = page(place[0])[first : first + count * size]
        if result.numel() != count * size:
            self._fail(f"a {role} reaches beyond its page")
        return result


def _is_aligned(stored: torch.Tensor) -> bool:
    return stored.storage_offset() % 4 == 0 and stored.data_ptr() % 4 == 0
