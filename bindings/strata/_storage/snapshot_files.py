"""Snapshots on the disk: a series of folders, and links to the page files on every drive.

    runs/llama/step-000500/manifest.json, state.bin         # a folder of the series "runs/llama"
    /mnt/nvme/strata-snapshots/<id>-0.pages, <id>.json      # on each drive: a link, and whose it is

Format, version 4. The folder is a checkpoint's (checkpoint.py), but most tensors lie in pages:

    state.bin      bytes that are in no page, one behind the other: the persistent buffers, and
                   tensors of `extra`
    manifest.json  {"checksum", "version", "bytes": as in a checkpoint,
                    "snapshot": 2, 3 or 4, "id": 16 hex digits,
                    "step": of the run, "time": ns since 1970,
                    "drives":  [{"folder": of the drive, or "" for the snapshot's own, "file"}],
                    "page_bytes", "moment_dtype",
                    "params":  as in a checkpoint, each with the "rule" of its moments,
                    "parts":   [[place in params, first element]], of each of the run's parameters,
                    "chunks":  see below,
                    "buffers", "groups", "rng": as in a checkpoint,
                    "extra":   what the caller gave, as extras.py has it,
                    "scales":  pages of the scales of 8-bit moments, or null,
                    "tensors": of extra,
                    "gradients": null, or of what had landed since the step: see below,
                    "zeros":   parts whose gradient the user has made zero,
                    "ranks":   from version 3: how many of "drives" each rank has, rank 0 first,
                    "others":  from version 3: {"rng", "extra", "tensors"} of rank 1 and each next,
                    "machines": version 4: by rank, what its machine is called}

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

A snapshot that several ranks have taken is of version 3; one of a process that is alone says 2, and
has none of this. Each rank has page files, slots and links of its own, and a chunk also has its
"rank": slot s of it lies in file s % n of that rank's n drives. It has no gradients, nor scales.

Version 4 is that of ranks of several machines. A drive's folder is a path on its rank's machine. A
machine that does not see rank 0's folder of the series has a folder of its own, with the same two
files: the whole manifest, with the same id. The snapshot counts from the moment that rank 0 has the
manifest; until then no other machine has it, and everything else is on the disk of all of them. See
snapshot_machines.py.

Version 1 had no gradients: no "gradients", "zeros" and "grad", runs without their last two values,
and the scales of all chunks in state.bin, where "scales" says.

A link is one more name of the file that the run wrote to; the kernel frees the file with its last
one. A manifest that is called removed.json is one of a snapshot that is being removed. Nothing here
knows models.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointError,
    complete_at,
    read_manifest,
    replace_folder,
    tidy,
)
from .replacing import make_folder, remove_unmarked, sync, targets_of_work, write_whole

FORMAT, RANKS_FORMAT, MACHINES_FORMAT = 2, 3, 4
FORMATS = (1, 2, 3, 4)
ROLES = ("param", "residual", "exp_avg", "exp_avg_sq")
GRAD = "grad"
LINKS = "strata-snapshots"
STEP_NAME = re.compile(r"step-(\d{6,12})")
ID = re.compile(r"[0-9a-f]{16}")
LINK_NAME = re.compile(LINKS + r"/[0-9a-f]{16}-\d{1,4}\.pages")
COPY_NAME = re.compile(r"pages-\d{1,4}\.bin")
OWNER_MARK = "links of a snapshot"
REMOVED_NAME = "removed.json"

PATH_BYTES_MAX = 4096  # the kernel's

_under_way: set[str] = set()  # ids that this process has not finished


def step_folder(series: Path, step: int) -> Path:
    """Where the snapshot behind a step lies."""
    return series / f"step-{step:06d}"


def is_snapshot(manifest: dict[str, Any]) -> bool:
    """Whether it is one of a snapshot, of any version."""
    return "snapshot" in manifest


def snapshots_of(series: Path) -> list[Path]:
    """The complete ones, the oldest first; also one that a killed process was about to replace.
    Their order is that of their manifests' times, which make_newest() keeps true: a run may have
    gone back to an earlier step, and another one may use the same series."""
    if not series.is_dir():
        return []
    names = {entry.name for entry in series.iterdir()} | set(targets_of_work(series))
    found = []
    for name in filter(STEP_NAME.fullmatch, names):
        if (folder := complete_at(series / name)) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append(((folder / MANIFEST_NAME).stat().st_mtime_ns, name, folder))
    return [folder for *_, folder in sorted(found)]


def check_series(path: Path) -> None:
    """Raises CheckpointError where something else is at the path of a series."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a series of snapshots is a folder")
    if (path / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{path} is the folder of a checkpoint or a snapshot, which strata.load would find "
            "instead of the series there: give another path"
        )


@contextlib.contextmanager
def taking_place(folder: Path) -> Iterator[Path]:
    """As replace_folder(), and with what another snapshot has on the drives, of another run that
    came by this step."""
    tidy(folder)
    replaced = links_at(folder)
    if replaced is not None:
        mark_pending(*replaced, folder)
    with replace_folder(folder) as new:
        yield new
    if replaced is not None:
        remove_links(*replaced)


class Links:
    """The names that a snapshot gives to the page files, on every drive. Until finish() a killed
    process leaves them to the next one's clean_up()."""

    def __init__(self, drives: list[str], folder: Path, identity: str = "") -> None:
        """Notes on each drive that they will be there. `identity`: what another rank's are called,
        of the same snapshot. Raises OSError."""
        self.id = identity or secrets.token_hex(8)
        self.drives = drives
        self._folder = folder
        _under_way.add(self.id)
        try:
            for drive in drives:
                make_folder(Path(drive) / LINKS)
                _write_owner(Path(drive), self.id, folder, pending=True)
        except BaseException:
            _under_way.discard(self.id)
            raise

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

    def lead_to_what_is_there(self) -> bool:
        """Whether the manifest that is in the folder now needs them."""
        return id_at(self._folder) == self.id

    def finish(self) -> None:
        """The manifest is there."""
        for drive, path in zip(self.drives, self.paths, strict=True):
            if not os.path.exists(path):  # the pages were copied
                remove_links([drive], self.id)
                continue
            _write_owner(Path(drive), self.id, self._folder, pending=False)
        _under_way.discard(self.id)

    def leave(self) -> None:
        """Something failed behind the manifest: clean_up() sees what is there."""
        _under_way.discard(self.id)

    def remove(self) -> None:
        """There will be no manifest, or it is gone."""
        _under_way.discard(self.id)
        remove_links(self.drives, self.id)


def clean_up(drives: list[str], clears: bool = True) -> None:
    """Removes what is left of snapshots that were never complete, or were being removed: links, and
    files in their series. Of several ranks the first of a machine comes first, and the others do
    not clear: whatever they have of such a snapshot on their drives, it has there as well.
    REQUIRES: the drives' lock is ours, so who left them is dead."""
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
            if clears:
                with contextlib.suppress(OSError):  # the series cannot be written to: its links go
                    _clear_folder(Path(owner["folder"]))
            if id_at(Path(owner["folder"])) == entry.stem:
                _write_owner(Path(drive), entry.stem, Path(owner["folder"]), pending=False)
            else:
                remove_links([drive], entry.stem)


def pending_on(drives: list[str]) -> dict[str, Path]:
    """By id: where the manifests of snapshots would be of which nobody knows here whether they are
    complete; those that are being removed are not. REQUIRES: as clean_up()."""
    found = {}
    for drive in drives:
        for entry in sorted((Path(drive) / LINKS).glob("*.json")):
            owner = _owner(entry)
            if owner is None or not owner["pending"] or entry.stem in _under_way:
                continue
            folder = Path(owner["folder"])
            if id_at(folder, REMOVED_NAME) != entry.stem:
                found[entry.stem] = folder
    return found


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
    return [i for i, folder in owners_on(drive).items() if id_at(folder) != i]


def _clear_folder(folder: Path) -> None:
    """Of one that is pending, and whose process is dead: what it left there."""
    if not STEP_NAME.fullmatch(folder.name):
        return
    tidy(folder)
    remove_unmarked(folder.parent, folder.name)
    finish_removal(folder)
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


def remove_snapshot(folder: Path) -> None:
    """Removes a snapshot: its manifest first, so that none is there in part. Other files in its
    folder stay. Raises CheckpointError where it is none."""
    folder = Path(os.path.realpath(folder))  # whoever goes on with it may have another directory
    manifest = read_manifest(folder)
    if not is_snapshot(manifest):
        raise CheckpointError(f"{folder} is a checkpoint, and no snapshot")
    check_drives(manifest, folder)
    drives = [d["folder"] for d in manifest["drives"] if d["folder"]]
    mark_pending(drives, manifest["id"], folder)
    os.replace(folder / MANIFEST_NAME, folder / REMOVED_NAME)
    sync(folder)
    finish_removal(folder)


def mark_pending(drives: list[str], identity: str, folder: Path) -> None:
    """From here on clean_up() removes the links, unless they are the ones of what is there then."""
    for drive in drives:
        with contextlib.suppress(OSError):  # a drive that is not there: its links stay
            if _owner(_owner_path(Path(drive), identity)) is not None:
                _write_owner(Path(drive), identity, folder, pending=True)


def mark_going(drives: list[str], identities: Iterable[str]) -> None:
    """As mark_pending(), of snapshots that another machine removes."""
    for drive in drives:
        for identity in identities:
            if (folder := link_owner(Path(drive), identity)) is not None:
                _write_owner(Path(drive), identity, folder, pending=True)


def finish_removal(folder: Path) -> None:
    """Removes the rest of a snapshot whose removal has begun; nothing where there is none."""
    try:
        manifest = read_manifest(folder, REMOVED_NAME)
        check_drives(manifest, folder)
    except CheckpointError:
        return
    own = [d["file"] for d in manifest["drives"] if not d["folder"]]
    for name in (STATE_NAME, *own, REMOVED_NAME):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the user's files are there
        folder.rmdir()
    # Last: their owner tells that the folder was ours, whenever this is killed.
    remove_links([d["folder"] for d in manifest["drives"] if d["folder"]], manifest["id"])


def finish_removals(series: Path) -> None:
    """Of all in the series that killed processes have begun."""
    for folder in series.iterdir() if series.is_dir() else []:
        if STEP_NAME.fullmatch(folder.name) and (folder / REMOVED_NAME).is_file():
            finish_removal(folder)


def is_path(text: str) -> bool:
    """Whether it may be one of ours: from the root on, and of this world."""
    try:
        return os.path.isabs(text) and "\0" not in text and len(os.fsencode(text)) < PATH_BYTES_MAX
    except UnicodeError:
        return False


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
            sound &= is_path(drive["folder"]) and name is not None
        else:
            sound &= COPY_NAME.fullmatch(drive["file"]) is not None
    sound = sound and _shares_out(manifest)
    if not sound or not ID.fullmatch(manifest["id"]):
        raise CheckpointError(f"{folder} is a damaged snapshot: its drives or its id make no sense")


def _shares_out(manifest: dict[str, Any]) -> bool:
    """Whether each drive is one rank's, and each rank on one machine."""
    ranks = manifest.get("ranks", [len(manifest["drives"])])
    if not isinstance(ranks, list) or not all(type(n) is int and n > 0 for n in ranks):
        return False
    machines = manifest.get("machines", [""] * len(ranks))
    if not isinstance(machines, list) or not all(isinstance(name, str) for name in machines):
        return False
    return sum(ranks) == len(manifest["drives"]) and len(machines) == len(ranks)


def drives_by_rank(manifest: dict[str, Any]) -> list[list[dict[str, str]]]:
    """The drives that each rank has; of a process that was alone, all are its own. REQUIRES:
    check_drives()."""
    left = iter(manifest["drives"])
    counts = manifest.get("ranks", [len(manifest["drives"])])
    return [[next(left) for _ in range(count)] for count in counts]


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
    sound = all(isinstance(owner.get(k), t) for k, t in kinds.items())
    return owner if sound and is_path(owner["folder"]) else None


def link_owner(drive: Path, identity: str) -> Path | None:
    """The folder of the snapshot that has links on the drive; None: nobody says, or it is not
    complete."""
    owner = _owner(_owner_path(drive, identity))
    return None if owner is None or owner["pending"] else Path(owner["folder"])


def id_at(folder: Path, name: str = MANIFEST_NAME) -> str | None:
    """The id of the snapshot in a folder; None: there is none that is whole."""
    try:
        found = read_manifest(folder, name).get("id")
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
    """Removes what a snapshot has on the drives, if that is ours; last what rank 0 has: see
    clean_up()."""
    for drive in reversed(drives):
        folder = Path(drive) / LINKS
        if not folder.is_dir() or _owner(_owner_path(Path(drive), identity)) is None:
            continue
        for link in folder.glob(f"{identity}-*.pages"):
            link.unlink(missing_ok=True)
        _owner_path(Path(drive), identity).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
