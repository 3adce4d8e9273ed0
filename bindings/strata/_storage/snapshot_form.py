"""What the manifest of a snapshot must say, beside its types (manifests.py), of all that is in no
page, before anything is loaded by it: the ranks, and the records of state.bin.

    check_form(manifest, fail)                # fail(why) raises

Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

ALIGNMENT = 4096  # of what pages are read into
MOMENT_BLOCK = 64  # elements that share a scale
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "block8": 1}  # of moments


def check_form(manifest: dict[str, Any], fail: Callable[[str], NoReturn]) -> None:
    """Calls `fail` where it contradicts the format, whatever the model."""
    others = manifest.get("others", [])
    _check_ranks(manifest, 1 + len(others), fail)
    buffers = [entry["tensors"][0] | {"shape": entry["shape"]} for entry in manifest["buffers"]]
    tensors = [record for said in (manifest, *others) for record in said["tensors"]]
    for record in [*buffers, *tensors]:
        if not _fits(record, manifest["bytes"]):
            fail(f"a tensor lies where it cannot: {record!r:.80}")


def _check_ranks(manifest: dict[str, Any], said: int, fail: Callable[[str], NoReturn]) -> None:
    """`said`: of how many ranks it has random states."""
    several = "ranks" in manifest
    ranks = len(manifest["ranks"]) if several else 1
    if ranks != said:
        fail(f"it has drives of {ranks} ranks, and says something of {said}")
    unsaid = -1 if several else 0
    if not all(chunk.get("rank", unsaid) in range(ranks) for chunk in manifest["chunks"]):
        fail("a chunk is of no rank")
    if not _has_copies_of_machines(manifest, ranks):
        fail("what it says of other machines makes no sense")


def _has_copies_of_machines(manifest: dict[str, Any], ranks: int) -> bool:
    """Whether each copy is one of a chunk, on a machine that has no other. REQUIRES: its chunks are
    of ranks."""
    copies, chunks = manifest.get("copies", []), manifest["chunks"]
    machines = manifest.get("machines", [""] * ranks)
    there = set()
    for number, copy in copies:
        if number >= len(chunks) or copy.get("rank", -1) not in range(ranks):
            return False
        machine = machines[copy["rank"]]
        if machine == machines[chunks[number].get("rank", 0)]:
            return False
        there.add((number, machine))
    return len(there) == len(copies)


def _fits(record: dict[str, Any], end: int) -> bool:
    """Whether a tensor of this dtype and shape has as many bytes, and they are in the file."""
    dtype = getattr(torch, record["dtype"], None)
    if not isinstance(dtype, torch.dtype) or record["offset"] + record["bytes"] > end:
        return False
    return bool(record["bytes"] == math.prod(record["shape"]) * dtype.itemsize)
