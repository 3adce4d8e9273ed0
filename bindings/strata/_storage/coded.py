"""Parameters that rest as codes, as checkpoints have them: codes and scales as they are.

    values(state, tensor, "scales")           # the bytes of all its parts
    restore(state, tensor, records, file, meter.add)

What the values were that were quantised is not known any more, and to quantise those that the codes
stand for gives other scales. So codes go into files and come back, bit for bit. Those of tiles lie
part behind part (../_runtime/coded.py, Note [Cuts]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .._runtime import coded
from .._runtime.wrapped import Wrapped
from .checkpoint_files import CheckpointError, Record, TensorReader
from .stored import StoredTensor


def values(state: Wrapped, tensor: StoredTensor, kind: str) -> Iterator[memoryview]:
    """The bytes of one kind, of all parts."""
    for param in tensor.parts:
        yield coded.read(state, param)[coded.KINDS.index(kind)].view(torch.uint8).numpy().data


def restore(
    state: Wrapped,
    tensor: StoredTensor,
    records: list[Record],
    file: TensorReader,
    count: Callable[[int], None],
) -> None:
    """Codes and scales of all parts. `count` is told of bytes that were read. REQUIRES: the records
    have the groups of these parts."""
    begins = [0 for _ in records]
    for param in tensor.parts:
        stored = coded.empty(state, param)
        for i, (part, record) in enumerate(zip(stored, records, strict=True)):
            raw, at = part.view(torch.uint8), 0
            for chunk in file.chunks(record, begins[i], raw.numel()):
                raw[at : at + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
                at += len(chunk)
                count(len(chunk))
            begins[i] += at
        coded.write(state, param, stored)
    for begin, record in zip(begins, records, strict=True):
        if begin != record["bytes"]:
            raise CheckpointError(
                f"{record['kind']} of {tensor.name!r} have {record['bytes']} bytes, and {begin} "
                "are the model's"
            )
