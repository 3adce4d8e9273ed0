"""Budgets held against what this machine has. What cannot be is refused at once, what is not free
now is warned of, and file systems that are no plain disk get a word of their own.

    for warning in check(sizes.parse_budgets(memory), "host", ["/mnt/nvme"]):
        log.warning("%s", warning)
    remarks(...)                                  # the same for a plan on paper: refuses nothing

Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .._config import machine
from .._config.choices import HOST
from .._config.machine import FileSystem
from .._config.sizes import format_size
from .._errors import StrataError

MEMORY_KINDS = {"tmpfs", "ramfs"}
NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")
# By what Linux calls a file system: what a folder there means for pages.
KINDS = {
    **dict.fromkeys(MEMORY_KINDS, "is memory: what rests there counts as host memory"),
    "btrfs": "is on btrfs, which writes every page to a new place and computes a checksum of its "
    "own: `chattr +C` on the empty folder turns both off",
    "zfs": "is on ZFS, which writes every page to a new place, computes a checksum of its own and "
    "may keep pages in a cache beside the host budget (ARC): limit it with zfs_arc_max, or "
    "take another file system",
    "overlay": "is in the writable layer of a container: give a volume, which is faster and does "
    "not go with the container",
    "9p": "is a folder of the system outside (as /mnt/c is under WSL), which is many times slower "
    "than a disk: take a folder inside of Linux",
    "drvfs": "is a Windows folder, which is many times slower than a disk: take a folder inside of "
    "Linux",
    **dict.fromkeys(NETWORKS, "is on a network, which every page has to cross"),
}


def check(memory: Mapping[str, int], device: str, ssd_paths: Sequence[str]) -> list[str]:
    """Warnings. `memory`: budgets by tier, those that were given; `device`: the core's name of it.

    Raises StrataError, with the numbers, for a budget larger than what there is in all.
    """
    refused, warned = _compare(memory, device, ssd_paths)
    if refused:
        raise StrataError("; ".join(refused))
    return [*warned, *file_systems(ssd_paths)]


def remarks(memory: Mapping[str, int], device: str, ssd_paths: Sequence[str]) -> list[str]:
    """What check() would say, for a machine on paper that need not be this one."""
    refused, warned = _compare(memory, device, ssd_paths)
    here = [f"on this machine it would be refused: {text}" for text in refused]
    return [*here, *warned, *file_systems(ssd_paths)]


def file_systems(paths: Sequence[str]) -> list[str]:
    """What there is to know of file systems that are no plain disk."""
    kinds = {path: machine.file_system(path).kind for path in paths}
    return [f"{path} {KINDS[kind]}" for path, kind in kinds.items() if kind in KINDS]


def _compare(
    memory: Mapping[str, int], device: str, ssd_paths: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What cannot be, and what is not free now."""
    disks = {os.stat(path).st_dev: machine.file_system(path) for path in ssd_paths}
    refused, warned = [], []
    for what, budget, total, free in (
        _host(memory, device, list(disks.values())),
        _ssd(memory, list(disks.values())),
    ):
        size = f"{what} of {format_size(budget)}"
        if budget > total:
            refused.append(
                f"{size}: this machine has {format_size(total)}, {format_size(free)} of it free"
            )
        elif budget > free:
            warned.append(f"{size}: only {format_size(free)} of {format_size(total)} are free now")
    return refused, warned


def _host(
    memory: Mapping[str, int], device: str, disks: Sequence[FileSystem]
) -> tuple[str, int, int, int]:
    """All that takes host memory: what it is, the sum, what there is, and what is free."""
    taken = {"host": memory.get("host", 0)}
    if device == HOST:
        taken["device"] = memory.get("device", 0)
    if disks and all(disk.kind in MEMORY_KINDS for disk in disks):
        taken["ssd"] = memory.get("ssd", 0)
    names = [tier for tier, size in taken.items() if size]
    plural = "s, which share its memory," if len(names) > 1 else ""
    what = f"{' and '.join(names)} budget{plural}"
    return what, sum(taken.values()), machine.host_bytes(), machine.free_host_bytes()


def _ssd(memory: Mapping[str, int], disks: Sequence[FileSystem]) -> tuple[str, int, int, int]:
    budget = memory.get("ssd", 0) if disks else 0
    where = ", ".join(disk.mount for disk in disks)
    total = sum(disk.total_bytes for disk in disks)
    return f"ssd budget on {where}", budget, total, sum(disk.free_bytes for disk in disks)
