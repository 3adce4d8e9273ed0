"""Parameters that rest as codes: made of values, and read and written as they rest.

    coded.quantise(state, index, weight)
    stored = coded.read(state, index)           # codes, scales, groups of scales: flat, on the CPU
    coded.write(other_state, index, stored)

Each is as optimizers/codes/form.hpp has it: codes in the order of elements, two of 4 bits in a
byte; a scale for each block of 64; in nf4-double a factor and an offset for each 256 blocks.
nf4-torchao is nf4-double with torchao's arithmetic: such codes are read, and none are made.

Note [Cuts]. Blocks and groups are counted from the first element of a parameter. A tensor in tiles
is many parameters, each with groups of its own, of which the last may be smaller. So codes of one
cut can become those of another only where both have the same blocks and groups: each border between
parts of the one lies between groups of the other. Then their bytes are the same, too, joined part
behind part. Everywhere else scales would have to be made anew, from values that nobody has.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from .. import _core
from .._config.frozen import BLOCK
from .._config.managed import DTYPE_NAMES

if TYPE_CHECKING:
    from .._core import StoredName
    from .ready_codes import ReadyCodes
    from .wrapped import Wrapped

GROUP = 256 * BLOCK
KINDS = ("codes", "scales", "groups")
TORCHAO: StoredName = "nf4-torchao"
DOUBLE: tuple[StoredName, ...] = ("nf4-double", TORCHAO)  # scales of 8 bits


def grain(form: StoredName) -> int:
    """Elements that need no scale of others."""
    return GROUP if form in DOUBLE else BLOCK


def kinds(form: StoredName, *parts: int) -> list[tuple[str, str, int]]:
    """What there is of a parameter of so many elements, or of several, one behind the other: kind,
    dtype and how many of that."""
    numel = sum(parts)
    codes = ("codes", "uint8", numel if form == "int8" else numel // 2)
    if form not in DOUBLE:
        return [codes, ("scales", "float32", numel // BLOCK)]
    groups = sum(-(-part // GROUP) for part in parts)
    return [codes, ("scales", "uint8", numel // BLOCK), ("groups", "float32", 2 * groups)]


def same_groups(form: StoredName, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a tensor has the same blocks and groups where it is cut into parts of so many
    elements, and of so many. See Note [Cuts]."""
    step = grain(form)
    return _on_borders(one, other, step) and _on_borders(other, one, step)


def _on_borders(cut: Sequence[int], other: Sequence[int], step: int) -> bool:
    begins = [0, *accumulate(other)]
    ends = accumulate(cut)
    return all((end - begins[bisect_right(begins, end) - 1]) % step == 0 for end in ends)


def piece(
    form: StoredName, stored: Sequence[torch.Tensor], first: int, count: int
) -> list[torch.Tensor]:
    """Of what read() returns, that of so many elements from `first` on. Raises ValueError where
    they share a scale with those before them, or are not all there."""
    if first % grain(form):
        raise ValueError(f"elements from {first} on share a scale with those before them")
    found = []
    begins, ends = kinds(form, first), kinds(form, first + count)
    for part, (kind, _, begin), (_, _, end) in zip(stored, begins, ends, strict=True):
        if end > part.numel():
            raise ValueError(f"{kind} up to {end} are asked for, and there are {part.numel()}")
        found.append(part[begin:end])
    return found


class Whole:
    """The values of a tensor whose tiles are quantised one by one."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: one behind the other."""
        self._parts = parts

    @functools.cached_property
    def scale_offset(self) -> float:
        """Of nf4-double, as bitsandbytes computes it, to the last bit. REQUIRES: each part has
        whole blocks."""
        largest = [
            _plain(part).reshape(-1, BLOCK).abs().amax(dim=1).float() for part in self._parts
        ]
        return float(torch.cat(largest).mean())


def quantise(state: Wrapped, index: int, value: torch.Tensor, whole: Whole | None = None) -> bool:
    """Makes codes of all values of the parameter. `whole`: what it is a tile of. False: it does not
    rest so. Raises ValueError for a part of them and for codes of torchao, StrataError where its
    unit is entered or a value is not finite: then nothing has changed."""
    form = state.config["params"][index].get("stored")
    if form is None:
        return False
    if value.shape != state.aliases[index].shape:
        raise ValueError(f"{state.names[index]!r} rests as codes, and is written whole")
    if form == TORCHAO:
        raise ValueError(
            f"{state.names[index]!r} is to rest as codes of torchao, and its values are none: they "
            "are read and not made. Pass frozen='nf4-double', or a function that gives None for "
            "this module"
        )
    plain = _plain(value)
    offset = None
    if form == "nf4-double":
        offset = (whole or Whole([plain])).scale_offset
        if not math.isfinite(offset):  # the core names the tile whose value it is
            offset = Whole([plain]).scale_offset
    state.session.quantise(
        index, plain.data_ptr(), DTYPE_NAMES[plain.dtype], state.row_elements[index], offset
    )
    return True


def _plain(value: torch.Tensor) -> torch.Tensor:
    plain = value.detach().to("cpu").contiguous()
    return plain if plain.dtype in DTYPE_NAMES else plain.float()


def take(state: Wrapped, index: int, ready: ReadyCodes) -> bool:
    """Codes of somebody else, as they are. False: the parameter does not rest as codes. Raises
    ValueError where its form, or its dtype, would give other values."""
    form = state.config["params"][index].get("stored")
    if form is None:
        return False
    name, dtype = state.names[index], state.aliases[index].dtype
    if ready.form != "int8" and ready.dtype != dtype:
        raise ValueError(
            f"the weights of {name!r} were quantised in {ready.dtype}, and the model computes in "
            f"{dtype}, which would round their values once more: pass dtype={ready.dtype}"
        )
    write(state, index, ready.to_form(form, name))
    return True


def empty(state: Wrapped, index: int) -> list[torch.Tensor]:
    """Room for what read() returns."""
    spec = state.config["params"][index]
    return [
        torch.empty(count, dtype=getattr(torch, dtype), device="cpu")
        for _, dtype, count in kinds(spec["stored"], spec["numel"])
    ]


def read(state: Wrapped, index: int) -> list[torch.Tensor]:
    """As kinds() lists them."""
    state.landings.wait()
    stored = empty(state, index)
    state.session.read_codes(index, 0, _buffers(stored))
    return stored


def write(state: Wrapped, index: int, stored: list[torch.Tensor], first: int = 0) -> None:
    """What read() returned, of this parameter or of another one of the same size and form; or a
    part of that, of elements from `first` on."""
    state.landings.wait()
    state.session.write_codes(index, first, _buffers(stored))


def in_page(page: torch.Tensor, form: StoredName, first: int, count: int) -> list[torch.Tensor]:
    """Views of what a page of codes has of its elements from `first` on, as kinds() lists them.
    `first` is that of a block, and in forms of DOUBLE of 256 of them."""
    _, scales_at, groups_at = _core.packing(form, page.numel())
    begins = {"codes": 0, "scales": scales_at, "groups": groups_at}
    ahead = dict.fromkeys(KINDS, 0) | {kind: n for kind, _, n in kinds(form, first)}
    found = []
    for kind, dtype, number in kinds(form, count):
        size = getattr(torch, dtype).itemsize
        begin = begins[kind] + ahead[kind] * size
        found.append(page[begin : begin + number * size].view(getattr(torch, dtype)))
    return found


def _buffers(stored: list[torch.Tensor]) -> tuple[memoryview, memoryview, memoryview]:
    raw = [part.view(torch.uint8).numpy().data for part in stored]
    codes, scales, groups = (*raw, memoryview(bytearray()))[:3]
    return codes, scales, groups
