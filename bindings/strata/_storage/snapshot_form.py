"""What the manifest of a snapshot must say of all that is in no page, before anything is loaded by
it: the records of state.bin, the extras, and the types of what everything else is read from.

    for problem in unsound(manifest): ...     # sentences; none: it may be held against the model

A manifest with a right checksum may still be another program's, or that of a bug. Pure functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from .._config.conforms import conforms
from . import extras

ALIGNMENT = 4096  # of what pages are read into
MOMENT_BLOCK = 64  # elements that share a scale
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "block8": 1}  # of moments
DIGEST = re.compile(r"[0-9a-f]{16}")
RECORD = {"kind": str, "dtype": str, "offset": int, "bytes": int, "xxh3_64": str}
FORM: dict[str, Any] = {
    "bytes": int,
    "step": int,
    "page_bytes": int,
    "moment_dtype": str,
    "params": list[dict[str, Any]],
    "parts": list[list[int]],
    "chunks": list[dict[str, Any]],
    "buffers": list[dict[str, Any]],
    "groups": list[dict[str, Any]],
    "rng": dict[str, Any],
    "extra": dict[str, Any],
    "extra_state": dict[str, Any],
    "tensors": list[dict[str, Any]],
}
PARAM = {"name": str, "shape": list[int], "dtype": str, "trainable": bool, "rule": str}
PARAM |= {"tiles": int, "tensors": list[dict[str, Any]]}
RANK: dict[str, Any] = {
    "rng": dict[str, Any],
    "extra": dict[str, Any],
    "tensors": list[dict[str, Any]],
}
BUFFER = {"name": str, "shape": list[int], "tensors": list[dict[str, Any]]}


def unsound(manifest: dict[str, Any]) -> Iterator[str]:
    """How it contradicts the format, whatever the model."""
    for key, form in FORM.items():
        if not conforms(manifest.get(key), form, {}):
            yield f"{key!r} is missing, or of another type"
            return
    for entry in manifest["params"]:
        if not conforms({key: entry.get(key) for key in PARAM}, PARAM, {}):
            yield f"a parameter is {entry!r:.60}"
            return
    for entry in manifest["buffers"]:
        if not conforms(entry, BUFFER, {}) or len(entry["tensors"]) != 1:
            yield f"a buffer is {entry!r:.60}"
            return
    buffers = [entry["tensors"][0] | {"shape": entry["shape"]} for entry in manifest["buffers"]]
    others = manifest.get("others", [])
    if not conforms(others, list[dict[str, Any]], {}) or not all(map(_is_rank, others)):
        yield "what it says of other ranks makes no sense"
        return
    yield from _problems_of_ranks(manifest, len(others))
    tensors = [record for said in (manifest, *others) for record in said["tensors"]]
    for record in [*buffers, *tensors]:
        if not _fits(record, manifest["bytes"]):
            yield f"a tensor lies where it cannot: {record!r:.80}"
    for said in (manifest, *others):
        yield from extras.problems(said["extra"], len(said["tensors"]))
    if not 0 <= manifest["step"] < 1 << 53:
        yield f"it is behind step {manifest['step']}"


def _is_rank(said: dict[str, Any]) -> bool:
    return conforms({key: said.get(key) for key in RANK}, RANK, {})


def _problems_of_ranks(manifest: dict[str, Any], others: int) -> Iterator[str]:
    several = "ranks" in manifest
    ranks = len(manifest.get("ranks", [])) if several else 1
    if ranks != 1 + others:
        yield f"it has drives of {ranks} ranks, and says something of {1 + others}"
    owners = [chunk.get("rank", None if several else 0) for chunk in manifest["chunks"]]
    if not all(type(owner) is int and 0 <= owner < ranks for owner in owners):
        yield "a chunk is of no rank"
    elif not _has_copies_of_machines(manifest, ranks):
        yield "what it says of other machines makes no sense"


def _has_copies_of_machines(manifest: dict[str, Any], ranks: int) -> bool:
    """Whether each copy is one of a chunk, on a machine that has no other. REQUIRES: its chunks are
    of ranks."""
    copies = manifest.get("copies", [])
    if not conforms(copies, list[list[Any]], {}):
        return False
    chunks, machines = manifest["chunks"], manifest.get("machines", [""] * ranks)
    there = set()
    for copy in copies:
        if [type(value) for value in copy] != [int, dict] or not 0 <= copy[0] < len(chunks):
            return False
        number, rank = copy[0], copy[1].get("rank")
        if type(rank) is not int or not 0 <= rank < ranks:
            return False
        if machines[rank] == machines[chunks[number].get("rank", 0)]:
            return False
        there.add((number, machines[rank]))
    return len(there) == len(copies)


def _lies(record: Any, end: int) -> bool:
    """Whether it is a record of bytes in the file."""
    if not isinstance(record, dict):
        return False
    if not conforms({key: record.get(key) for key in RECORD}, RECORD, {}):
        return False
    offset, count = record["offset"], record["bytes"]
    inside = offset >= 0 and count >= 0 and offset + count <= end
    return inside and DIGEST.fullmatch(record["xxh3_64"]) is not None


def _fits(record: dict[str, Any], end: int) -> bool:
    """Whether a tensor of this dtype and shape has as many bytes, and they are in the file."""
    shape: Any = record.get("shape")
    if not _lies(record, end) or not conforms(shape, list[int], {}):
        return False
    dtype = getattr(torch, record["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not all(size >= 0 for size in shape):
        return False
    return bool(record["bytes"] == math.prod(shape) * dtype.itemsize)
