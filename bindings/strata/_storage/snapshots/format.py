"""Snapshots on the disk: a series of folders, and links to the page files on every drive.

    runs/llama/step-000500/manifest.json, state.bin         # a folder of the series "runs/llama"
    /mnt/nvme/strata-snapshots/<id>-0.pages, <id>.json      # on each drive: a link, and whose it is

Format, version 9. The folder is a checkpoint's (../checkpoint.py), but most tensors lie in pages:

    state.bin      bytes that are in no page, one behind the other: the persistent buffers, and
                   tensors of `extra`
    manifest.json  {"checksum": as in a checkpoint, "bytes": of state.bin,
                    "snapshot": 9, "id": 16 hex digits,
                    "step": of the run, "time": ns since 1970,
                    "drives":  [{"folder": of the drive, or "" for the snapshot's own, "file"}],
                    "page_bytes", "moment_dtype",
                    "params":  as in a checkpoint, each with the "rule" of its moments,
                    "parts":   [[place in params, first element]], of each of the run's parameters,
                    "chunks":  see below,
                    "buffers", "groups", "rng", "extra", "extra_state": as in a checkpoint,
                    "tensors": of extra,
                    "ranks":   of several: how many of "drives" each rank has, rank 0 first,
                    "others":  likewise: {"rng", "extra", "tensors"} of rank 1 and each next}

A chunk is {"runs": [[part, first element there, count, first element in the chunk, updates that
these have had]], "scale_page": the page that has the scales of its 8-bit moments, maybe beside
those of other chunks, or null, "scales": [byte of exp_avg's there, of exp_avg_sq's], and of each
role (param, residual, exp_avg, exp_avg_sq) null, or [elements in a page, byte where they begin,
pages]}, a page being [slot, version, checksum, bytes], or null where it is zero. Slot s lies
in file s % n of the n drives, at page s // n, and holds so many bytes from there on, a multiple of
4096; the number is left out where it is all of the page. The checksum is XXH3-64 of these bytes,
seeded with slot and version (offload/storage/checksum.cpp).

Where several ranks have taken it, each has page files, slots and links of its own, and a chunk also
has its "rank": slot s of it lies in file s % n of that rank's n drives.

A link is one more name of the file that the run wrote to; the kernel frees the file with its last
one. A manifest that is called removed.json is one of a snapshot that is being removed. Nothing here
knows models.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..checkpoint_files import MANIFEST_NAME, CheckpointError, read_manifest
from ..manifests import PLACES, SNAPSHOT, sound

FORMAT = 9
ALIGNMENT = 4096  # of what pages are read into
MOMENT_BLOCK = 64  # elements that share a scale
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "block8": 1}  # of moments
ROLES = ("param", "residual", "exp_avg", "exp_avg_sq")
LINKS = "strata-snapshots"
ID = re.compile(r"[0-9a-f]{16}")
LINK_NAME = re.compile(LINKS + r"/[0-9a-f]{16}-\d{1,4}\.pages")
COPY_NAME = re.compile(r"pages-\d{1,4}\.bin")
REMOVED_NAME = "removed.json"
PATH_BYTES_MAX = 4096  # the kernel's


def bytes_held(page: list[int], page_bytes: int) -> int:
    """How many bytes a page of a manifest has in its slot."""
    return page[3] if len(page) > 3 else page_bytes


def is_snapshot(manifest: dict[str, Any]) -> bool:
    """Whether it is one of a snapshot, of any version."""
    return "snapshot" in manifest


def is_path(text: str) -> bool:
    """Whether it may be one of ours: from the root on, and of this world."""
    try:
        return os.path.isabs(text) and "\0" not in text and len(os.fsencode(text)) < PATH_BYTES_MAX
    except UnicodeError:
        return False


def check_drives(manifest: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError for an id or file that no snapshot has."""
    where = f"{folder} is a damaged snapshot"
    places = sound(PLACES, manifest, where)
    for drive in places["drives"]:
        name = LINK_NAME if drive["folder"] else COPY_NAME
        here = is_path(drive["folder"]) or not drive["folder"]
        if not here or not name.fullmatch(drive["file"]):
            raise CheckpointError(f"{where}: {drive!r:.100} is no drive of it")
    ranks: list[int] = places.get("ranks", [len(places["drives"])])
    if sum(ranks) != len(places["drives"]):
        raise CheckpointError(f"{where}: its ranks have not as many drives as there are")


def drives_by_rank(manifest: dict[str, Any]) -> list[list[dict[str, str]]]:
    """The drives that each rank has; of a process that was alone, all are its own. REQUIRES:
    check_drives()."""
    left = iter(manifest["drives"])
    counts = manifest.get("ranks", [len(manifest["drives"])])
    return [[next(left) for _ in range(count)] for count in counts]


def id_at(folder: Path, name: str = MANIFEST_NAME) -> str | None:
    """The id of the snapshot in a folder; None: there is none that is whole."""
    try:
        found = read_manifest(folder, name).get("id")
    except CheckpointError:
        return None
    return found if isinstance(found, str) else None


def read_places(folder: Path) -> dict[str, Any]:
    """The manifest of the snapshot in a folder, of any version: its id and its drives make sense.
    Raises CheckpointError: there is none, it is one of a checkpoint, or it is damaged."""
    manifest = read_manifest(folder)
    if not is_snapshot(manifest):
        raise CheckpointError(
            f"{folder} is a checkpoint of strata.save, and no snapshot: its files are all in that "
            "folder, which can be copied or removed as it is"
        )
    check_drives(manifest, folder)
    return manifest


def read_snapshot(folder: Path) -> dict[str, Any]:
    """Likewise, of this version, with the form of manifests.py."""
    manifest = read_places(folder)
    if manifest["snapshot"] != FORMAT:
        raise CheckpointError(
            f"{folder} is a snapshot of version {manifest['snapshot']!r:.20}; this strata reads "
            f"{FORMAT}"
        )
    return sound(SNAPSHOT, manifest, f"{folder} is a damaged snapshot")


def links_at(folder: Path) -> tuple[list[str], str] | None:
    """The drives and the id of the snapshot that is in a folder; None: there is none."""
    try:
        manifest = read_manifest(folder)
        check_drives(manifest, folder)
    except CheckpointError:
        return None
    return [d["folder"] for d in manifest["drives"] if d["folder"]], manifest["id"]
