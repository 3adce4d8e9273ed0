"""What this machine has: host memory (control groups respected), processors and what they can, disk
space and file systems. Asks Linux, and needs no torch.
"""

import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mountinfo")
CPUINFO = Path("/proc/cpuinfo")
# What Linux calls arithmetic in bfloat16, on x86 and on Arm.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@dataclass(frozen=True)
class FileSystem:
    """Where a folder lies."""

    kind: str  # as Linux names it: ext4, btrfs, tmpfs
    mount: str
    total_bytes: int
    free_bytes: int


def host_bytes() -> int:
    """Memory that this process can have at most: what the machine has, or its control group."""
    limits = [limit for limit, _ in _cgroup_files() if limit is not None]
    return min([_meminfo("MemTotal"), *limits])


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


def processor_name() -> str:
    """What this machine calls its processor."""
    names = re.findall(r"(?m)^model name\s*:\s*(.*)$", _cpuinfo())
    return names[0].strip() if names else platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """What the processors can do, as Linux names it."""
    found = re.findall(r"(?m)^(?:flags|Features)\s*:(.*)$", _cpuinfo())
    return set(" ".join(found).split())


def has_bfloat16(flags: Collection[str]) -> bool:
    """Whether processors with these flags compute in bfloat16. Others do it piece by piece, several
    times more slowly than in float32."""
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def mounts() -> Iterator[tuple[str, str]]:
    """Where file systems are mounted, bind mounts too, and their kinds; in order. Raises OSError
    where Linux does not tell."""
    for line in MOUNTS.read_text().splitlines():
        before, _, behind = line.partition(" - ")
        escaped = before.split()[4]
        yield re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), escaped), behind.split()[0]


def file_system(path: str | Path) -> FileSystem:
    """The one that a folder lies on. Raises OSError where there is no such folder."""
    place = Path(path).resolve(strict=True)
    kind, mount = "", "/"
    for there, found in mounts():
        # Of mounts over each other the last one is seen.
        if place.is_relative_to(there) and len(there) >= len(mount):
            kind, mount = found, there
    usage = shutil.disk_usage(place)
    return FileSystem(kind, mount, usage.total, usage.free)


def free_disk_bytes(paths: Iterable[str]) -> int:
    """What the file systems under `paths` have free, each one counted once."""
    devices: dict[int, int] = {}
    for path in paths:
        devices[os.stat(path).st_dev] = shutil.disk_usage(path).free
    return sum(devices.values())


def _cpuinfo() -> str:
    return CPUINFO.read_text() if CPUINFO.exists() else ""


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
