"""Cuts the arguments of a forward into slices of the batch, and puts the outputs together.

    outputs = []
    for piece in cut(arguments.tensors, batch_size(arguments.tensors), 4):
        args, kwargs = arguments.filled(piece)
        outputs.append(Arguments(module.forward(*args, **kwargs)))
    result = merged(outputs, verdict.cut)

The batch is the first dimension of the first tensor. Every other tensor with as many rows is cut as
well, and all others are given to each slice. Whether that is right is tried: see trial.py. Pure
functions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import Arguments


@dataclass(frozen=True)
class Verdict:
    """Why a forward may not be cut, or "" and which tensors of its output are cut with the batch.
    The others are the same for every slice."""

    reason: str
    cut: tuple[bool, ...] = ()


def batch_size(tensors: Sequence[torch.Tensor]) -> int:
    """Rows in the batch; 0 where there is none."""
    return tensors[0].size(0) if tensors and tensors[0].dim() else 0


def is_cut(tensor: torch.Tensor, batch: int) -> bool:
    """Whether a tensor is taken to have one row for each row of the batch."""
    return tensor.dim() > 0 and tensor.size(0) == batch


def cut(tensors: Sequence[torch.Tensor], batch: int, count: int) -> Iterator[list[torch.Tensor]]:
    """The arguments of each slice: views of the tensors. The first slices may be a row longer."""
    parts = [t.tensor_split(count) if is_cut(t, batch) else [t] * count for t in tensors]
    return (list(piece) for piece in zip(*parts, strict=True))


def fits(outputs: Sequence[Arguments], cut_ones: Sequence[bool], batch: int) -> bool:
    """Whether outputs have the form that `cut_ones` tells: they may be merged then."""
    if any(o.others or len(o.tensors) != len(cut_ones) for o in outputs):
        return False
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return all(
        not cut_here or (all(t.dim() for t in column) and sum(t.size(0) for t in column) == batch)
        for cut_here, column in zip(cut_ones, columns, strict=True)
    )


def merged(outputs: Sequence[Arguments], cut_ones: Sequence[bool]) -> Any:
    """The output of the whole batch. `cut_ones`: which of its tensors are cut with the batch.
    All its tensors are new ones, with nodes of autograd of their own."""
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return outputs[0].filled(
        [
            torch.cat(column) if cut_here else column[0].view_as(column[0])
            for cut_here, column in zip(cut_ones, columns, strict=True)
        ]
    )
