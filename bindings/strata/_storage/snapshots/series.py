"""A series of snapshots: its folders, how one takes its place there, and how one goes.

    with taking_place(step_folder(series, 500)) as new: ...     # complete, or as before
    snapshots_of(series)                                        # the oldest first
    remove_snapshot(folder)
    clean_up(drives)                                            # what killed processes left

The format is described in format.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint_files import (
    MANIFEST_NAME,
    NEW_NAME,
    OLD_NAME,
    STATE_NAME,
    CheckpointError,
    complete_at,
    read_manifest,
    replace_folder,
    tidy,
)
from ..replacing import make_newest, sync, targets_of_work
from ..ssd_folders import rank_folders
from ..together import Together
from .format import LINKS, REMOVED_NAME, check_drives, id_at, links_at, read_places
from .links import mark_complete, mark_pending, pending_on, remove_halves, remove_links

STEP_NAME = re.compile(r"step-(\d{6,12})")


def step_folder(series: Path, step: int) -> Path:
    """Where the snapshot behind a step lies."""
    return series / f"step-{step:06d}"


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


def clean_up(drives: list[str], clears: bool = True) -> None:
    """Removes what is left of snapshots that were never complete, or were being removed: links, and
    files in their series. Of several ranks the first of a machine comes first, and the others do
    not clear: whatever they have of such a snapshot on their drives, it has there as well.
    REQUIRES: the drives' lock is ours, so who left them is dead."""
    for drive in map(Path, drives):
        remove_halves(drive)
        for identity, folder in pending_on(drive).items():
            if clears:
                with contextlib.suppress(OSError):  # the series cannot be written to: its links go
                    _clear_folder(folder, identity)
            if id_at(folder) == identity:
                mark_complete(drive, identity, folder)
            else:
                remove_links([str(drive)], identity)


def recover(drives: list[str], together: Together, cleans: bool) -> None:
    """Removes what killed processes left on the drives, before anything looks at the links there.
    All ranks call it, and rank 0 goes first. `cleans`: this one has to. REQUIRES: no snapshot is
    under way."""
    for leads in (True, False):
        with together.phase():
            if cleans and together.leads == leads:
                _clean_up_all(drives, together)


def _clean_up_all(drives: list[str], together: Together) -> None:
    abandoned = _abandoned(drives, together)
    clean_up([*drives, *abandoned], clears=together.leads)
    for folder in abandoned:
        with contextlib.suppress(OSError):  # a complete snapshot has links there
            os.rmdir(folder)


def _abandoned(drives: list[str], together: Together) -> list[str]:
    """What an earlier run of other ranks, or of one process, had beside the drives, for rank 0.
    REQUIRES: this run alone is in these folders."""
    if not together.leads:
        return []
    ours = {f"rank-{rank}" for rank in range(together.count)} if together.count > 1 else set()
    found: list[Path] = []
    for drive in map(Path, drives):
        home = drive.parent if ours else drive
        found += [home] if ours else []
        found += [folder for folder in rank_folders(home) if folder.name not in ours]
    return [str(folder) for folder in found if (folder / LINKS).is_dir()]


def make_newest_of(series: Path, new: Path) -> None:
    """The manifest in a new folder is the newest of its series."""
    make_newest(new / MANIFEST_NAME, [each / MANIFEST_NAME for each in snapshots_of(series)])


def _clear_folder(folder: Path, identity: str) -> None:
    """Of one that is pending, and whose process is dead: what it left there. Whoever worked with
    that snapshot in its hands was that process, also where another boot of the machine began it."""
    if not STEP_NAME.fullmatch(folder.name):
        return
    tidy(folder, lambda work: identity in (id_at(work / OLD_NAME), id_at(work / NEW_NAME)))
    finish_removal(folder)
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()


def remove_snapshot(folder: Path) -> None:
    """Removes a snapshot: its manifest first, so that none is there in part. Other files in its
    folder stay. Raises CheckpointError where it is none."""
    folder = Path(os.path.realpath(folder))  # whoever goes on with it may have another directory
    manifest = read_places(folder)
    drives = [d["folder"] for d in manifest["drives"] if d["folder"]]
    mark_pending(drives, manifest["id"], folder)
    os.replace(folder / MANIFEST_NAME, folder / REMOVED_NAME)
    sync(folder)
    finish_removal(folder)


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
