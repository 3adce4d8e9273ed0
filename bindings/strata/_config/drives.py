"""What there is to know of the drive behind a folder: its name and model, whether files on it can
pass the page cache by, what was written to it, and how far it is worn. Needs no torch.

    drive = drives.drive_of("/mnt/nvme")       # None where no block device can be named
    drives.why_not_direct("/mnt/nvme")         # "" where O_DIRECT works

Linux tells nobody a drive's wear: `smartctl` asks the drive, which takes root. Functions take the
`root` that /sys lies under, as those of machine.py do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .machine import ROOT, read_text

SECTOR_BYTES = 512  # in which the kernel counts, whatever the drive's own
NVME_UNIT_BYTES = 512_000  # in which drives count what was written
SMART_SECONDS = 5.0


@dataclass(frozen=True)
class Drive:
    """A whole block device."""

    name: str  # as in /dev
    model: str  # "" where it does not say
    written_bytes: int  # since the system started


@dataclass(frozen=True)
class Health:
    """What a drive tells of itself."""

    used_percent: int  # of its endurance; may be more than 100
    written_bytes: int  # in all its life


def drive_of(path: str | Path, root: Path = ROOT) -> Drive | None:
    """The drive that a folder lies on. None for file systems that have no device of their own
    (btrfs, ZFS, overlay, tmpfs, networks). Raises OSError where there is no such folder."""
    number = os.stat(path).st_dev
    place = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    try:
        folder = place.resolve(strict=True)
    except OSError:
        return None
    if (folder / "partition").exists():
        folder = folder.parent
    counts = read_text(folder / "stat").split()
    return Drive(
        folder.name,
        read_text(folder / "device/model").strip(),
        int(counts[6]) * SECTOR_BYTES if len(counts) > 6 else 0,
    )


def why_not_direct(path: str | Path) -> str:
    """Why files in a folder cannot be read and written past the page cache; "" where they can.
    Raises OSError where no file can be made at all."""
    handle, name = tempfile.mkstemp(prefix=".strata-", dir=path)
    os.close(handle)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        os.unlink(name)
    return ""


def health(drive: Drive, ask: Callable[[str], str] | None = None) -> Health | str:
    """What the drive tells of its wear, or why that is not known. `ask` gives what smartctl prints
    of a device, and raises OSError where it cannot."""
    try:
        text = (ask or _smartctl)(f"/dev/{drive.name}")
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    try:
        found = json.loads(text)
        log = found["nvme_smart_health_information_log"]
        return Health(log["percentage_used"], log["data_units_written"] * NVME_UNIT_BYTES)
    except (ValueError, KeyError, TypeError):
        return "smartctl has no wear of it (which takes root, and a drive that tells)"


def _smartctl(device: str) -> str:
    program = shutil.which("smartctl")
    if program is None:
        raise FileNotFoundError("smartctl is not installed (package smartmontools)")
    command = [program, "--json", "--all", device]
    # Its exit status tells of the drive; what it prints says whether it could ask.
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMART_SECONDS)
    return done.stdout
