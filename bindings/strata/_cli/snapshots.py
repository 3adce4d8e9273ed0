"""`strata snapshots`: looks after what strata.snapshot() keeps, on all drives.

strata snapshots ls runs/llama
strata snapshots copy runs/llama/step-000500 /backup/step-000500
strata snapshots rm runs/llama/step-000400
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .._config.sizes import format_size
from .._storage.checkpoint_files import CheckpointError, read_manifest
from .._storage.snapshot_files import (
    check_drives,
    copy_snapshot,
    is_snapshot,
    page_paths,
    remove_snapshot,
    slots_of,
    snapshots_of,
)


def run(options: argparse.Namespace) -> int:
    """Returns 0; 1 where a snapshot is missing or damaged. `options`: of
    options.snapshots_parser()."""
    try:
        if options.action == "ls":
            return _list(options.series)
        if options.action == "copy":
            copy_snapshot(options.snapshot, options.to)
            print(f"{options.to} needs no other drive")
        for folder in options.snapshots if options.action == "rm" else []:
            remove_snapshot(folder)
            print(f"removed {folder}")
    except (CheckpointError, OSError) as error:
        print(f"strata: {error}")
        return 1
    return 0


def _list(series: Path) -> int:
    found = snapshots_of(series)
    for folder in found:
        try:
            print(_line(folder))
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            print(f"{folder.name}  damaged: {error}")
    if not found:
        print(f"{series} has no complete snapshot")
    return 0 if found else 1


def _line(folder: Path) -> str:
    manifest = read_manifest(folder)
    if not is_snapshot(manifest):
        raise CheckpointError("a checkpoint, and no snapshot")
    check_drives(manifest, folder)
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"] / 1e9))
    size = format_size(len(slots_of(manifest)) * manifest["page_bytes"])
    drives = [drive["folder"] for drive in manifest["drives"]]
    where = "in the folder" if drives == [""] * len(drives) else f"on {', '.join(drives)}"
    missing = [path for path in page_paths(manifest, folder) if not Path(path).is_file()]
    lost = f"; {missing[0]} is missing" if missing else ""
    return f"{folder.name}  {taken}  {size} {where}{lost}"
