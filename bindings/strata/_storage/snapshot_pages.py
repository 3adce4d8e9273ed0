"""Pages of a snapshot: in which slots they are, and copies of them that need no drive.

    slots = slots_of(manifest)
    copy_snapshot(folder, to)

The format is described in snapshot_files.py.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .checkpoint_files import (
    STATE_NAME,
    CheckpointError,
    read_manifest,
    replace_folder,
    write_manifest,
)
from .replacing import sync
from .snapshot_files import GRAD, ROLES, check_drives


def copy_pages(files: list[int], slots: Iterable[int], page_bytes: int, folder: Path) -> list[str]:
    """Copies the pages of these slots into files of the folder, where they lie at the same places,
    with holes between them. Returns the files' names. Memory used: one page."""
    names = [f"pages-{i}.bin" for i in range(len(files))]
    targets = [os.open(folder / n, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for n in names]
    try:
        with mmap.mmap(-1, page_bytes) as page:  # aligned, for files that are read directly
            places = sorted(slots)
            rows = places[-1] // len(files) + 1 if places else 1
            for target in targets:
                os.ftruncate(target, rows * page_bytes)
            for slot in places:
                offset = slot // len(files) * page_bytes
                if os.preadv(files[slot % len(files)], [page], offset) != page_bytes:
                    raise CheckpointError(f"a page file ends before slot {slot}")
                _write_all(targets[slot % len(files)], page, offset)
        for target in targets:
            os.fsync(target)
    finally:
        for target in targets:
            os.close(target)
    return names


def copy_snapshot(folder: Path, to: Path) -> None:
    """Makes a snapshot that needs no drive but the folder's. `to` must not exist. Raises OSError,
    CheckpointError."""
    manifest = read_manifest(folder)
    check_drives(manifest, folder)
    if to.exists():
        raise CheckpointError(f"{to} exists")
    files = [os.open(path, os.O_RDONLY | os.O_NOFOLLOW) for path in page_paths(manifest, folder)]
    try:
        with replace_folder(to) as new:
            names = copy_pages(files, slots_of(manifest), manifest["page_bytes"], new)
            shutil.copyfile(folder / STATE_NAME, new / STATE_NAME)
            sync(new / STATE_NAME)
            manifest["drives"] = [{"folder": "", "file": name} for name in names]
            manifest["id"] = secrets.token_hex(8)
            write_manifest(new, manifest)
    finally:
        for file in files:
            os.close(file)


def page_paths(manifest: dict[str, Any], folder: Path) -> list[str]:
    """Of the page files."""
    return [os.path.join(d["folder"] or folder, d["file"]) for d in manifest["drives"]]


def slots_of(manifest: dict[str, Any]) -> set[int]:
    """Every slot that holds a page of it."""
    return {page[0] for page in pages_of(manifest)}


def pages_of(manifest: dict[str, Any]) -> list[list[int]]:
    """Slot, version and checksum of every page, in order."""
    scales = manifest["scales"] if isinstance(manifest["scales"], list) else []
    return scales + [
        page
        for chunk in manifest["chunks"]
        for role in (*ROLES, GRAD)
        for page in (chunk.get(role) or ((), (), ()))[2]
        if page is not None
    ]


def _write_all(file: int, data: mmap.mmap, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        offset += count
        view = view[count:]
