"""Pages of a snapshot: in which slots they are, and copies of them that need no drive.

    slots = slots_of(manifest)
    copy_snapshot(folder, to)

The format is described in format.py.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..._core import SavedPages
from ..._errors import StrataError
from ..checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointError,
    read_manifest,
    replace_folder,
    write_manifest,
)
from ..replacing import sync, writing
from .format import (
    ALIGNMENT,
    ROLES,
    bytes_held,
    drives_by_rank,
    read_snapshot,
)

Slot = tuple[int, int, int, int]
"""With the version, the checksum and the number of the bytes in it."""
Read = Callable[[int, torch.Tensor], None]
"""Reads what is in a slot to memory that is aligned."""


def copy_pages(
    read: Read, drives: int, slots: Iterable[Slot], page_bytes: int, folder: Path, first: int = 0
) -> list[str]:
    """Copies what these slots hold into files of the folder, where it lies at the same places, with
    holes between. `first`: the number of the first file. Returns the files' names. Memory used: one
    page."""
    names = [f"pages-{first + i}.bin" for i in range(drives)]
    targets = [os.open(folder / n, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for n in names]
    page = page_memory(page_bytes)
    held = sorted(slots)
    rows = held[-1][0] // drives + 1 if held else 1
    try:
        with writing(folder, sum(size for *_, size in held)):
            for target in targets:
                os.ftruncate(target, rows * page_bytes)
            for slot, _, _, size in held:
                read(slot, page)
                _write_all(targets[slot % drives], page[:size], slot // drives * page_bytes)
            for target in targets:
                os.fsync(target)
    finally:
        for target in targets:
            os.close(target)
    return names


def page_memory(size: int) -> torch.Tensor:
    """Bytes that pages can be read to."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def from_files(files: list[int], page_bytes: int) -> Read:
    """Of a session, which knows that its pages are whole."""

    def read(slot: int, page: torch.Tensor) -> None:
        at = slot // len(files) * page_bytes
        if os.preadv(files[slot % len(files)], [page.numpy().data], at) != page_bytes:
            raise CheckpointError(f"a page file ends before slot {slot}")

    return read


def copy_snapshot(folder: Path, to: Path) -> None:
    """Makes a snapshot that needs no drive but the folder's. Every page is verified. `to` must not
    exist. Raises OSError, CheckpointError: where a page is damaged, and where the snapshot is
    removed meanwhile."""
    manifest = read_snapshot(folder)
    if to.exists():
        raise CheckpointError(f"{to} exists")
    try:
        with replace_folder(to) as new:
            names: list[str] = []
            for rank, drives in enumerate(drives_by_rank(manifest)):
                read = _verified(manifest, folder, rank)
                slots, size = slots_of(manifest, rank), manifest["page_bytes"]
                names += copy_pages(read, len(drives), slots, size, new, len(names))
            shutil.copyfile(folder / STATE_NAME, new / STATE_NAME)
            sync(new / STATE_NAME)
            if read_manifest(folder)["id"] != manifest["id"]:
                raise CheckpointError(f"another snapshot took the place of {folder}")
            manifest["drives"] = [{"folder": "", "file": name} for name in names]
            manifest["id"] = secrets.token_hex(8)
            write_manifest(new, manifest)
    except (StrataError, OSError, CheckpointError) as error:
        if not (folder / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{folder} was removed while it was copied: {error}") from error
        if isinstance(error, StrataError):
            raise CheckpointError(f"{folder} cannot be copied: {error}") from error
        raise


def saved_pages(
    manifest: dict[str, Any], folder: Path, rank: int, io_engine: str = "auto"
) -> SavedPages:
    """The pages that a rank has of a snapshot. Raises StrataError, TypeError, ValueError."""
    drives = drives_by_rank(manifest)[rank]
    folders = [drive["folder"] or str(folder) for drive in drives]
    names = [drive["file"] for drive in drives]
    held = slots_of(manifest, rank)
    return SavedPages(folders, names, manifest["page_bytes"], held, io_engine)


def _verified(manifest: dict[str, Any], folder: Path, rank: int) -> Read:
    """Raises StrataError."""
    pages = saved_pages(manifest, folder, rank)

    def read(slot: int, page: torch.Tensor) -> None:
        pages.read([slot], page.data_ptr())

    return read


def page_paths(manifest: dict[str, Any], folder: Path) -> list[str]:
    """Of the page files."""
    return [os.path.join(d["folder"] or folder, d["file"]) for d in manifest["drives"]]


def slots_of(manifest: dict[str, Any], rank: int = 0) -> list[Slot]:
    """Every slot that holds a page of a rank's, once. REQUIRES: "page_bytes" and "chunks" are there
    and have the form of manifests.py."""
    found: dict[int, Slot] = {}
    for page in _pages_of(manifest, rank):
        slot, version, checksum = page[:3]
        found[slot] = (slot, version, checksum, bytes_held(page, manifest["page_bytes"]))
    return list(found.values())


def bytes_of(manifest: dict[str, Any]) -> int:
    """Of all pages."""
    ranks = range(len(drives_by_rank(manifest)))
    return sum(size for rank in ranks for *_, size in slots_of(manifest, rank))


def _pages_of(manifest: dict[str, Any], rank: int) -> list[list[int]]:
    """Of every page that a rank has, what the manifest says; of one that chunks share, for each of
    them."""
    pages: list[list[int]] = []
    for chunk in manifest["chunks"]:
        if chunk.get("rank", 0) != rank:
            continue
        for role in ROLES:
            pages += [page for page in (chunk.get(role) or ((), (), ()))[2] if page is not None]
        if chunk.get("scale_page") is not None:
            pages.append(chunk["scale_page"])
    return pages


def _write_all(file: int, page: torch.Tensor, offset: int) -> None:
    view = page.numpy().data
    while view:
        count = os.pwrite(file, view, offset)
        offset += count
        view = view[count:]
