"""A weight that somebody else has quantised: its codes and scales, ready to rest.

    ready = ReadyCodes("nf4", shape, torch.bfloat16, [codes, scales])
    ready.to_form("nf4", name)       # as coded.write() takes it; ValueError where it is another
    ready.dense()                    # the values that the codes stand for

The parts are those of coded.kinds(), flat, on the CPU. Values are their library's to the bit.
bitsandbytes': what a code stands for times its scale in float32, rounded once to the dtype of the
weight that was quantised. torchao's: the same in that dtype, rounded after each operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import _core
from .._config.frozen import BLOCK
from .coded import DOUBLE, GROUP, TORCHAO, piece, same_groups

if TYPE_CHECKING:
    from .._core import StoredName

SCALE_BLOCK = GROUP // BLOCK  # scales that share one, in nf4-double
INT8_UNIT = torch.tensor(7.874015718698502e-3)  # 1/127, in bitsandbytes' digits


@functools.cache
def values_of_codes(name: str) -> torch.Tensor:
    """What codes of 4 bits ("nf4", "nf4-torchao"), or of scales ("scales"), stand for."""
    return torch.tensor(_core.code_values(name), dtype=torch.float32, device="cpu")


@dataclass(eq=False)
class ReadyCodes:
    """See above."""

    form: StoredName
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the weight that was quantised
    parts: list[torch.Tensor]

    def scales(self) -> torch.Tensor:
        """One for each block of 64, in float32; torchao's in the dtype of the weight."""
        if self.form not in DOUBLE:
            return self.parts[1]
        groups = torch.arange(len(self.parts[1])) // SCALE_BLOCK
        factor, offset = self.parts[2].reshape(-1, 2)[groups].T
        if self.form == TORCHAO:
            codes = self.parts[1].view(torch.int8).float()
            return (codes / factor).to(self.dtype) + offset.to(self.dtype)
        return values_of_codes("scales")[self.parts[1].long()] * factor + offset

    def dense(self) -> torch.Tensor:
        """The values, in the dtype of the weight."""
        codes = self.parts[0]
        if self.form == "int8":
            blocks = codes.view(torch.int8).float().reshape(-1, BLOCK)
            values = blocks * self.scales()[:, None] * INT8_UNIT
        else:
            both = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1, BLOCK)
            table = values_of_codes(TORCHAO if self.form == TORCHAO else "nf4")
            scales = self.scales()[:, None]
            values = table.to(scales.dtype)[both.long()] * scales
        return values.to(self.dtype).reshape(self.shape)

    def split(self, shapes: Sequence[tuple[int, ...]]) -> Iterator[ReadyCodes]:
        """As so many weights, whose rows lie one behind the other. Raises ValueError where they
        would share a scale."""
        if len(shapes) == 1:
            yield self
            return
        counts = [math.prod(shape) for shape in shapes]
        if not same_groups(self.form, counts, [sum(counts)]):
            raise ValueError(
                "a quantised weight is cut into tiles that would share scales: give a larger "
                "device budget, or frozen='as-is' and weights that are not quantised"
            )
        first = 0
        for shape, count in zip(shapes, counts, strict=True):
            parts = piece(self.form, self.parts, first, count)
            yield ReadyCodes(self.form, shape, self.dtype, parts)
            first += count

    def to_form(self, form: StoredName, name: str) -> list[torch.Tensor]:
        """The parts of a form that has the same values. Raises ValueError where it would have
        others, with what to ask for; `name`: of the parameter."""
        if form == self.form:
            return self.parts
        if (self.form, form) == ("nf4-double", "nf4"):
            return [self.parts[0], self.scales()]
        raise ValueError(
            f"the weights of {name!r} are codes of {self.form}, and {form} would round them once "
            f"more: frozen={self.form!r} takes them as they are, and frozen='as-is' their values"
        )
