"""What the manifest of a snapshot must say, beside its types (../manifests.py), before anything is
loaded by it.

    check_form(manifest, fail)                      # fail(why) raises
    check_chunks(manifest, tensors, fail)

Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import torch

from ..stored import StoredTensor
from .format import ALIGNMENT, ELEMENT_BYTES, MOMENT_BLOCK, ROLES, bytes_held

Manifest = dict[str, Any]
Fail = Callable[[str], NoReturn]


def check_form(manifest: dict[str, Any], fail: Fail) -> None:
    """Calls `fail` where it contradicts the format, whatever the model."""
    others = manifest.get("others", [])
    _check_ranks(manifest, 1 + len(others), fail)
    buffers = [entry["tensors"][0] | {"shape": entry["shape"]} for entry in manifest["buffers"]]
    tensors = [record for said in (manifest, *others) for record in said["tensors"]]
    for record in [*buffers, *tensors]:
        if not _fits(record, manifest["bytes"]):
            fail(f"a tensor lies where it cannot: {record!r:.80}")


def _check_ranks(manifest: dict[str, Any], said: int, fail: Fail) -> None:
    """`said`: of how many ranks it has random states."""
    several = "ranks" in manifest
    ranks = len(manifest["ranks"]) if several else 1
    if ranks != said:
        fail(f"it has drives of {ranks} ranks, and says something of {said}")
    unsaid = -1 if several else 0
    if not all(chunk.get("rank", unsaid) in range(ranks) for chunk in manifest["chunks"]):
        fail("a chunk is of no rank")


def _fits(record: dict[str, Any], end: int) -> bool:
    """Whether a tensor of this dtype and shape has as many bytes, and they are in the file."""
    dtype = getattr(torch, record["dtype"], None)
    if not isinstance(dtype, torch.dtype) or record["offset"] + record["bytes"] > end:
        return False
    return bool(record["bytes"] == math.prod(record["shape"]) * dtype.itemsize)


def check_chunks(manifest: Manifest, tensors: list[StoredTensor], fail: Fail) -> None:
    """Every element of every tensor is there once, in pages that no other chunk has."""
    covered: list[list[tuple[int, int]]] = [[] for _ in tensors]
    taken: dict[int, set[int]] = {}  # slots, by rank
    of_scales: dict[int, set[int]] = {}  # likewise; chunks share them
    size = manifest["page_bytes"]
    parts = manifest["parts"]
    if any(tensor >= len(tensors) for tensor, _ in parts):
        fail("a part is of no parameter")
    for chunk in manifest["chunks"]:
        for part, first, count, *_ in chunk["runs"]:
            if part >= len(parts):
                fail("a run is of no part")
            tensor, begin = parts[part]
            covered[tensor].append((begin + first, count))
    for chunk in manifest["chunks"]:
        mine: set[int] = set()
        slots = taken.setdefault(chunk.get("rank", 0), set())
        end = max((run[3] + run[2] for run in chunk["runs"]), default=0)
        if not _has_scales(manifest, chunk, end):
            fail("the scales of a chunk lie nowhere")
        if (page := chunk["scale_page"]) is not None:
            found = _check_pages([page], set(), size, fail)
            of_scales.setdefault(chunk.get("rank", 0), set()).update(found)
        for role in roles_of(chunk):
            mine |= _check_role(manifest, chunk, role, end, slots, fail)
        slots |= mine  # 8-bit moments share theirs
    if any(found & taken[rank] for rank, found in of_scales.items()):
        fail("scales lie in a slot of something else")
    for tensor_, runs in zip(tensors, covered, strict=True):
        end = 0
        for first, count in sorted(runs):
            if first != end:
                fail(f"elements of {tensor_.name!r} are missing, or there twice")
            end += count
        if end != tensor_.numel:
            fail(f"{tensor_.name!r} has {end} elements of {tensor_.numel}")


def cuts_of(manifest: Manifest, tensors: list[StoredTensor]) -> list[list[int]]:
    """Of each tensor, how many elements each part had. REQUIRES: the chunks are sound."""
    begins: list[set[int]] = [{tensor.numel} for tensor in tensors]
    for tensor, begin in manifest["parts"]:
        begins[tensor].add(begin)
    return [[end - begin for begin, end in pairwise(sorted(found))] for found in begins]


def _has_scales(manifest: Manifest, chunk: dict[str, Any], elements: int) -> bool:
    """Whether those of so many elements are there, of every moment that has them."""
    page, size = chunk["scale_page"], -(-elements // MOMENT_BLOCK) * 2
    moments = sum(chunk[role] is not None for role in ROLES[2:])
    if manifest["moment_dtype"] == "block8" and len(chunk["scales"]) < moments:
        return False
    if page is None:
        return not chunk["scales"]
    end = bytes_held(page, manifest["page_bytes"])
    return all(first <= end - size for first in chunk["scales"])


def _check_role(
    manifest: Manifest, chunk: dict[str, Any], role: str, end: int, slots: set[int], fail: Fail
) -> set[int]:
    """The slots of a role of a chunk, which has elements up to `end`."""
    per_page, begin, pages = chunk[role]
    size = manifest["page_bytes"]
    if per_page > 2 * size or begin >= size:  # codes have 4 bits
        fail("pages of no size, or with places beyond it")
    if end > per_page * len(pages):
        fail("a chunk has elements without pages")
    found = _check_pages(pages, slots, size, fail)
    short = [i for i, page in enumerate(pages) if page and bytes_held(page, size) < size]
    if short and _is_coded(manifest, chunk):
        fail("a page has fewer bytes than its elements")  # their scales lie at its end
    moment = ELEMENT_BYTES[manifest["moment_dtype"]]
    element = moment if role in ROLES[2:] else size // per_page
    for i in short:
        needed = begin + min(per_page, end - i * per_page) * element
        if bytes_held(pages[i], size) < needed:
            fail("a page has fewer bytes than its elements")
    return found


def _is_coded(manifest: Manifest, chunk: dict[str, Any]) -> bool:
    """Whether its parameters rest as codes."""
    tensors = {manifest["parts"][part][0] for part, *_ in chunk["runs"]}
    return any("stored" in manifest["params"][tensor] for tensor in tensors)


def _check_pages(pages: list[Any], slots: set[int], size: int, fail: Fail) -> set[int]:
    """Their slots, of which none may be in `slots`, or there twice."""
    found = set()
    for page in pages:
        if page is None:
            continue
        if page[3:] and (not 0 < page[3] < size or page[3] % ALIGNMENT != 0):
            fail("a page has a number of bytes that none has")
        if page[0] in slots or page[0] in found:
            fail(f"slot {page[0]} is there twice")
        found.add(page[0])
    return found


def roles_of(chunk: dict[str, Any]) -> list[str]:
    """Those that the chunk has pages of."""
    return [role for role in ROLES if chunk[role] is not None]
