"""Links of snapshots: the names that each drive has of a run's page files, and whose they are.

    links = Links(drives, folder)        # noted on each drive, as pending
    session.link_pages(links.paths)
    links.finish()                       # the manifest is in the folder: they stay
    link_owner(drive, links.id)          # the folder of the snapshot that has them

An owner that is pending says: nobody knows whether the manifest counts. It is written ahead of the
first link, and so is every change that ends with links removed. The format is described in
format.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from ..._schema import Form, FormError, parsed
from ..replacing import HALF_END, make_folder, sync, write_whole
from .format import ID, LINKS, id_at, is_path

OWNER_MARK = "links of a snapshot"


@dataclass(frozen=True)
class _Owner:
    """Whose the links of an id are, as its file says."""

    strata: str  # OWNER_MARK
    folder: str
    pending: bool


OWNER = Form(_Owner)
_under_way: set[str] = set()  # ids that this process has not finished


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
            mark_complete(Path(drive), self.id, self._folder)
        _under_way.discard(self.id)

    def leave(self) -> None:
        """Something failed behind the manifest: clean_up() sees what is there."""
        _under_way.discard(self.id)

    def remove(self) -> None:
        """There will be no manifest, or it is gone."""
        _under_way.discard(self.id)
        remove_links(self.drives, self.id)


def mark_pending(drives: list[str], identity: str, folder: Path) -> None:
    """From here on clean_up() removes the links, unless they are the ones of what is there then."""
    for drive in drives:
        with contextlib.suppress(OSError):  # a drive that is not there: its links stay
            if _owner(_owner_path(Path(drive), identity)) is not None:
                _write_owner(Path(drive), identity, folder, pending=True)


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


def mark_complete(drive: Path, identity: str, folder: Path) -> None:
    """Its manifest is there."""
    _write_owner(drive, identity, folder, pending=False)


def pending_on(drive: Path) -> dict[str, Path]:
    """By id: the folders of snapshots that nobody knows here whether they are complete. REQUIRES:
    the drive's lock is ours, so who left them is dead."""
    found = _folders_on(drive, pending=True)
    return {identity: folder for identity, folder in found.items() if identity not in _under_way}


def complete_on(drive: Path) -> dict[str, Path]:
    """By id: the folders of the snapshots that have links on a drive, complete ones."""
    return _folders_on(drive, pending=False)


def remove_halves(drive: Path) -> None:
    """Of owners that were being written. REQUIRES: as pending_on()."""
    for half in (drive / LINKS).glob(f"*.json*{HALF_END}"):
        identity = half.name.split(".")[0]
        if ID.fullmatch(identity) and identity not in _under_way:
            half.unlink(missing_ok=True)


def _folders_on(drive: Path, pending: bool) -> dict[str, Path]:
    found = {}
    for entry in sorted((drive / LINKS).glob("*.json")):
        owner = _owner(entry)
        if owner is not None and owner.pending == pending:
            found[entry.stem] = Path(owner.folder)
    return found


def lost_on(drive: Path) -> list[str]:
    """Ids of those whose folders do not have them any more: removed, or moved elsewhere."""
    return [i for i, folder in complete_on(drive).items() if id_at(folder) != i]


def link_owner(drive: Path, identity: str) -> Path | None:
    """The folder of the snapshot that has links on the drive; None: nobody says, or it is not
    complete."""
    owner = _owner(_owner_path(drive, identity))
    return None if owner is None or owner.pending else Path(owner.folder)


def _owner_path(drive: Path, identity: str) -> Path:
    return drive / LINKS / f"{identity}.json"


def _write_owner(drive: Path, identity: str, folder: Path, pending: bool) -> None:
    owner = _Owner(OWNER_MARK, str(folder), pending)
    write_whole(_owner_path(drive, identity), json.dumps(asdict(owner)))


def _owner(path: Path) -> _Owner | None:
    """What is said of links; None where they are not ours."""
    try:
        owner = OWNER.read(parsed(path.read_bytes()))
    except (OSError, FormError):
        return None
    sound = ID.fullmatch(path.stem) and owner.strata == OWNER_MARK and is_path(owner.folder)
    return owner if sound else None
