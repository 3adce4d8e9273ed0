"""`strata snapshots`: looks after what strata.snapshot() keeps, on all drives.

strata snapshots ls runs/llama
strata snapshots copy runs/llama/step-000500 /backup/step-000500
strata snapshots rm runs/llama/step-000400
strata snapshots ls /mnt/nvme
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from .._config.sizes import format_size
from .._storage.checkpoint_files import CheckpointError, read_manifest
from .._storage.snapshots.format import (
    LINKS,
    drives_by_rank,
    is_snapshot,
    read_places,
    read_snapshot,
)
from .._storage.snapshots.links import complete_on, lost_on, remove_links
from .._storage.snapshots.pages import bytes_of, copy_snapshot, page_paths
from .._storage.snapshots.series import remove_snapshot, snapshots_of


def run(options: argparse.Namespace) -> int:
    """Returns 0; 1 where a snapshot is missing or damaged. Raises CheckpointError and OSError.
    `options`: of options.snapshots_parser()."""
    if options.action == "ls":
        drives = _drives_at(options.place)
        if drives:
            return max(_list_drive(drive) for drive in drives)
        return _list(options.place)
    if options.action == "copy":
        copy_snapshot(_newest(options.snapshot), options.to)
        print(f"{options.to} needs no other drive")
        return 0
    return _remove(options.snapshots, options.lost)


def _newest(path: Path) -> Path:
    """Of a series; a snapshot itself."""
    found = snapshots_of(path)
    return found[-1] if found else path


def _remove(snapshots: list[Path], drives: list[Path]) -> int:
    for folder in snapshots:
        if series := snapshots_of(folder):
            raise CheckpointError(f"{folder} holds {len(series)}: name them, as {series[0]}")
        absent = {d: m for m, of in _drives(folder) for d in of if not os.path.isdir(d)}
        remove_snapshot(folder)
        print(f"removed {folder}")
        for gone, machine in absent.items():
            if machine:
                print(f"  {gone} of {machine} is not seen from here: do the same there")
            else:
                print(f"  {gone} is not there: later, strata snapshots rm --lost {gone}")
    for place in drives:
        lost = [(drive, identity) for drive in _drives_at(place) for identity in lost_on(drive)]
        for drive, identity in lost:
            owner = complete_on(drive)[identity]
            remove_links([str(drive)], identity)
            print(f"removed what {drive} kept for {owner}")
        if not lost:
            print(f"{place} keeps nothing for snapshots that were removed")
    return 0


def _drives_at(place: Path) -> list[Path]:
    """The drive, and those that ranks have in it, as far as snapshots have links there. Raises
    CheckpointError where there is no such folder."""
    if not place.is_dir():
        raise CheckpointError(f"{place} is no folder")
    folders = [place, *sorted(place.glob("rank-*"))]
    return [folder for folder in folders if (folder / LINKS).is_dir()]


def _drives(folder: Path) -> list[tuple[str, list[str]]]:
    """The machine of each rank, "" where there is one, and its drives."""
    manifest = read_places(folder)
    by_rank = [[d["folder"] for d in of if d["folder"]] for of in drives_by_rank(manifest)]
    return list(zip(manifest.get("machines", [""] * len(by_rank)), by_rank, strict=True))


def _list(place: Path) -> int:
    """Those in a series, and in all below it, as a Trainer has them; or the one that it is."""
    found = snapshots_of(place)
    if not found:
        series = sorted({path.parent.parent for path in place.rglob("step-*/manifest.json")})
        found = [folder for one in series for folder in snapshots_of(one)]
    if not found and (place / "manifest.json").is_file():
        found = [place]
    bad = False
    for folder in found:
        name = folder.relative_to(place) if folder != place else folder
        try:
            line, lacks = _line(folder)
        except CheckpointError as error:
            line, lacks = f"damaged: {error}", True
        print(f"{name}  {line}")
        bad = bad or lacks
    if not found:
        print(f"{place} has no complete snapshot")
    return 1 if bad or not found else 0


def _list_drive(drive: Path) -> int:
    """What a drive keeps for which snapshots."""
    lost = lost_on(drive)
    for identity, folder in complete_on(drive).items():
        link = next((drive / LINKS).glob(f"{identity}-*.pages"), None)
        size = 0 if link is None else link.stat().st_blocks * 512
        what = "; it is not there: removed, or moved" if identity in lost else ""
        print(f"{identity}  {format_size(size)} (shared with others) for {folder}{what}")
    if lost:
        print(f"to free what nobody needs: strata snapshots rm --lost {drive}")
    return 0


def _line(folder: Path) -> tuple[str, bool]:
    """What there is to say of a snapshot, and whether it lacks something."""
    if not is_snapshot(read_manifest(folder)):
        return "a checkpoint of strata.save, and no snapshot", False
    manifest = read_snapshot(folder)
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"] / 1e9))
    size = format_size(bytes_of(manifest))
    drives = [f"{m}: {d}" if m else d for m, of in _drives(folder) for d in of]
    where = f"on {', '.join(drives)}" if drives else "in the folder"
    missing = [path for path in page_paths(manifest, folder) if not Path(path).is_file()]
    afar = "machines" in manifest
    lost = f"; {missing[0]} {'is not seen from here' if afar else 'is missing'}" if missing else ""
    return f"{taken}  {size} {where}{lost}", bool(missing) and not afar
