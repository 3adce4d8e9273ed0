"""Snapshots on the disk: a series of folders, and links to the page files on every drive.

    runs/llama/step-000500/manifest.json, state.bin         # a folder of the series "runs/llama"
    /mnt/nvme/strata-snapshots/<id>-0.pages, <id>.json      # on each drive: a link, and whose it is

Format, version 2. The folder is a checkpoint's (checkpoint.py), but most tensors lie in pages:

    state.bin      bytes that are in no page, one behind the other: the persistent buffers, and
                   tensors of `extra`
    manifest.json  {"checksum", "version", "bytes": as in a checkpoint,
                    "snapshot": 2, "id": 16 hex digits, "step": of the run, "time": ns since 1970,
                    "drives":  [{"folder": of the drive, or "" for the snapshot's own, "file"}],
                    "page_bytes", "moment_dtype",
                    "params":  as in a checkpoint, each with the "rule" of its moments,
                    "parts":   [[place in params, first element]], of each of the run's parameters,
                    "chunks":  see below,
                    "buffers", "groups", "rng", "extra": as in a checkpoint,
                    "scales":  pages of the scales of 8-bit moments, or null,
                    "tensors": of extra; {"strata.tensor": i} stands for the ith there,
                    "gradients": null, or of what had landed since the step: see below,
                    "zeros":   parts whose gradient the user has made zero}

A chunk is {"runs": [[part, first element there, count, first element in the chunk, updates that
these have had, gradient]], "scales": [byte of exp_avg's, of exp_avg_sq's] in all pages of scales,
one behind the other, and of each role (param, residual, exp_avg, exp_avg_sq, grad) null, or
[elements in a page, byte where they begin, pages]}, a page being [slot, version, checksum], or null
where it is zero. Slot s lies in file s % n of the n drives, at page s // n. The checksum is XXH3-64
of the page, seeded with slot and version (offload/storage/checksum.cpp).

A run's gradient is 0: none; 1: of the step that is under way; 2: likewise, and with that of an
earlier step in it, which waited for its update (LockFree); or [place in "groups", number of the
update, what it is multiplied with]: that of an earlier step, whose update was still to come.
"gradients" is {"float32": whether they are sums in float32, else in their parameter's dtype,
"params": [[part, how many have landed, the sum of its squares, [factors that it was scaled with
since], bits of those that divide]], "groups": hyperparameters}. What a run of gradients is
multiplied with before it is used is not in its pages.

Version 1 had no gradients: no "gradients", "zeros" and "grad", runs without their last two values,
and the scales of all chunks in state.bin, where "scales" says.

A link is one more name of the file that the run wrote to; the kernel frees the file with its last
one. Nothing here knows models.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .._core import Hasher
from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    STATE_VERSION,
    CheckpointError,
    read_manifest,
    replace_folder,
    write_manifest,
)
from .replacing import sync, write_whole

FORMAT = 2
FORMATS = (1, 2)
ROLES = ("param", "residual", "exp_avg", "exp_avg_sq")
GRAD = "grad"
LINKS = "strata-snapshots"
STEP_NAME = re.compile(r"step-(\d{6,12})")
ID = re.compile(r"[0-9a-f]{16}")
LINK_NAME = re.compile(LINKS + r"/[0-9a-f]{16}-\d{1,4}\.pages")
COPY_NAME = re.compile(r"pages-\d{1,4}\.bin")
ENCODED_AT_ONCE = 64  # entries of a list in a manifest: less than a millisecond
OWNER_MARK = "links of a snapshot"

_under_way: set[str] = set()  # ids that this process has not finished


def step_folder(series: Path, step: int) -> Path:
    """Where the snapshot behind a step lies."""
    return series / f"step-{step:06d}"


def is_snapshot(manifest: dict[str, Any]) -> bool:
    """Whether it is one of a snapshot, of any version."""
    return "snapshot" in manifest


def snapshots_of(series: Path) -> list[Path]:
    """The complete ones, the oldest first."""
    found = []
    for folder in series.iterdir() if series.is_dir() else []:
        if STEP_NAME.fullmatch(folder.name) and (folder / MANIFEST_NAME).is_file():
            found.append(((folder / MANIFEST_NAME).stat().st_mtime_ns, folder.name, folder))
    return [folder for *_, folder in sorted(found)]


class Links:
    """The names that a snapshot gives to the page files, on every drive. Until finish() a killed
    process leaves them to the next one's clean_up()."""

    def __init__(self, drives: list[str], folder: Path) -> None:
        """Notes on each drive that they will be there. Raises OSError."""
        self.id = secrets.token_hex(8)
        self.drives = drives
        self._folder = folder
        _under_way.add(self.id)
        for drive in drives:
            (Path(drive) / LINKS).mkdir(exist_ok=True)
            _write_owner(Path(drive), self.id, folder, pending=True)

    @property
    def names(self) -> list[str]:
        """By drive, relative to it."""
        return [f"{LINKS}/{self.id}-{i}.pages" for i in range(len(self.drives))]

    @property
    def paths(self) -> list[str]:
        """By drive."""
        return [f"{d}/{name}" for d, name in zip(self.drives, self.names, strict=True)]

    def drive_entries(self) -> list[dict[str, str]]:
        """As the manifest names them."""
        return [{"folder": d, "file": n} for d, n in zip(self.drives, self.names, strict=True)]

    def sync(self) -> None:
        """Waits until the names are on the disks."""
        for drive in self.drives:
            sync(Path(drive) / LINKS)

    def finish(self) -> None:
        """The manifest is there."""
        for drive, path in zip(self.drives, self.paths, strict=True):
            if not os.path.exists(path):  # the pages were copied
                remove_links([drive], self.id)
                continue
            _write_owner(Path(drive), self.id, self._folder, pending=False)
        _under_way.discard(self.id)

    def remove(self) -> None:
        """There will be no manifest, or it is gone."""
        remove_links(self.drives, self.id)
        _under_way.discard(self.id)


def clean_up(drives: list[str]) -> None:
    """Removes links of snapshots that were never complete, or were being removed. REQUIRES: the
    drives' lock is ours, so who left them is dead."""
    for drive in drives:
        folder = Path(drive) / LINKS
        if not folder.is_dir():
            continue
        for half in folder.glob("*.json.tmp"):  # of an owner that was being written
            identity = half.name.split(".")[0]
            if ID.fullmatch(identity) and identity not in _under_way:
                half.unlink(missing_ok=True)
        for entry in sorted(folder.glob("*.json")):
            owner = _owner(entry)
            if owner is None or not owner["pending"] or entry.stem in _under_way:
                continue
            if _id_at(Path(owner["folder"])) == entry.stem:
                _write_owner(Path(drive), entry.stem, Path(owner["folder"]), pending=False)
            else:
                remove_links([drive], entry.stem)


def owners_on(drive: Path) -> dict[str, Path]:
    """By id: the folders of the snapshots that have links on a drive, complete ones."""
    found = {}
    for entry in sorted((drive / LINKS).glob("*.json")):
        owner = _owner(entry)
        if owner is not None and not owner["pending"]:
            found[entry.stem] = Path(owner["folder"])
    return found


def lost_on(drive: Path) -> list[str]:
    """Ids of those whose folders do not have them any more: removed, or moved elsewhere."""
    return [i for i, folder in owners_on(drive).items() if _id_at(folder) != i]


def remove_snapshot(folder: Path) -> None:
    """Removes a snapshot: its manifest first, so that none is there in part. Other files in its
    folder stay. Raises CheckpointError where it is none."""
    manifest = read_manifest(folder)
    if not is_snapshot(manifest):
        raise CheckpointError(f"{folder} is a checkpoint, and no snapshot")
    check_drives(manifest, folder)
    drives = [d["folder"] for d in manifest["drives"] if d["folder"]]
    with contextlib.suppress(OSError):  # a drive that is not there: its links stay
        for drive in drives:
            _write_owner(Path(drive), manifest["id"], folder, pending=True)
    (folder / MANIFEST_NAME).unlink()
    sync(folder)
    remove_links(drives, manifest["id"])
    own = [d["file"] for d in manifest["drives"] if not d["folder"]]
    for name in (STATE_NAME, *own):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the user's files are there
        folder.rmdir()


def check_drives(manifest: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError for an id or file that no snapshot has."""
    drives = manifest.get("drives")
    sound = isinstance(drives, list) and bool(drives) and isinstance(manifest.get("id"), str)
    for drive in drives if sound and isinstance(drives, list) else []:
        known = isinstance(drive, dict) and drive.keys() == {"folder", "file"}
        if not known or not all(isinstance(value, str) for value in drive.values()):
            sound = False
        elif drive["folder"]:
            name = LINK_NAME.fullmatch(drive["file"])
            sound &= os.path.isabs(drive["folder"]) and name is not None
        else:
            sound &= COPY_NAME.fullmatch(drive["file"]) is not None
    if not sound or not ID.fullmatch(manifest["id"]):
        raise CheckpointError(f"{folder} is a damaged snapshot: its drives or its id make no sense")


def write_large_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """As write_manifest(), but bit by bit, and other threads get their turn between two: what grows
    with the model takes a while."""
    manifest = {"version": STATE_VERSION} | manifest
    digest = Hasher()
    pieces = ["{"]
    for i, key in enumerate(sorted(manifest)):
        pieces.append(f"{', ' if i else ''}{json.dumps(key)}: ")
        pieces += _encoded(manifest[key])
    pieces.append("}")
    text = "".join(pieces)
    digest.update(text.encode())
    write_whole(folder / MANIFEST_NAME, f'{{"checksum": "{digest.hexdigest()}", {text[1:]}')
    sync(folder)


def _encoded(value: Any) -> Iterator[str]:
    if not isinstance(value, list) or len(value) <= ENCODED_AT_ONCE:
        yield json.dumps(value, sort_keys=True)
        return
    for first in range(0, len(value), ENCODED_AT_ONCE):
        part = json.dumps(value[first : first + ENCODED_AT_ONCE], sort_keys=True)
        yield f"{', ' if first else '['}{part[1:-1]}"
        give_way()
    yield "]"


def give_way() -> None:
    """Lets another thread have the interpreter that asks for it, sooner than it would."""
    time.sleep(0)


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


def _owner_path(drive: Path, identity: str) -> Path:
    return drive / LINKS / f"{identity}.json"


def _write_owner(drive: Path, identity: str, folder: Path, pending: bool) -> None:
    content = {"strata": OWNER_MARK, "folder": str(folder), "pending": pending}
    write_whole(_owner_path(drive, identity), json.dumps(content))


def _owner(path: Path) -> dict[str, Any] | None:
    """What is said of links; None where they are not ours."""
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"folder": str, "pending": bool}
    if not ID.fullmatch(path.stem) or not isinstance(owner, dict):
        return None
    if owner.get("strata") != OWNER_MARK:
        return None
    return owner if all(isinstance(owner.get(k), t) for k, t in kinds.items()) else None


def _id_at(folder: Path) -> str | None:
    try:
        found = read_manifest(folder).get("id")
    except CheckpointError:
        return None
    return found if isinstance(found, str) else None


def links_at(folder: Path) -> tuple[list[str], str] | None:
    """The drives and the id of the snapshot that is in a folder; None: there is none."""
    try:
        manifest = read_manifest(folder)
        check_drives(manifest, folder)
    except CheckpointError:
        return None
    return [d["folder"] for d in manifest["drives"] if d["folder"]], manifest["id"]


def remove_links(drives: list[str], identity: str) -> None:
    """Removes what a snapshot has on the drives, if that is ours."""
    for drive in drives:
        folder = Path(drive) / LINKS
        if not folder.is_dir() or _owner(_owner_path(Path(drive), identity)) is None:
            continue
        for link in folder.glob(f"{identity}-*.pages"):
            link.unlink(missing_ok=True)
        _owner_path(Path(drive), identity).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
