"""What this machine has free: host memory (control groups respected), processors, disk space."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Memory that this process may still take: what the machine has, or its control group."""
    free = _meminfo("MemAvailable")
    for limit, used in _cgroup_files():
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def free_disk_bytes(paths: Iterable[str]) -> int:
    """What the file systems under `paths` have free, each one counted once."""
    devices: dict[int, int] = {}
    for path in paths:
        devices[os.stat(path).st_dev] = shutil.disk_usage(path).free
    return sum(devices.values())


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def _cgroup_files() -> list[tuple[int | None, int | None]]:
    """(limit, use) of the control groups of this process and all above it, versions 2 and 1."""
    result = []
    for line in _groups():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / group.lstrip("/")
        # In a container the group is often mounted as the root itself.
        for place in [folder, *folder.parents]:
            if not place.is_relative_to(root):
                break
            result.append((_number(place / names[0]), _number(place / names[1])))
    return result


def _groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit
