"""What this machine has: host memory (control groups respected), processors and what they can, disk
space and file systems. Asks Linux, and needs no torch. What the kernel lets a process do is in
kernel.py, and what there is to know of drives in drives.py.

Functions that read /proc or /sys take the `root` that these lie under: tests give a folder.
"""

import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# What Linux calls arithmetic in bfloat16, on x86 and on Arm.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def boot_id(root: Path = ROOT) -> str:
    """Another one whenever the machine starts."""
    return (root / "proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Of this process: in another one, the numbers of processes mean others."""
    return os.readlink("/proc/self/ns/pid")


@dataclass(frozen=True)
class FileSystem:
    """Where a folder lies."""

    kind: str  # as Linux names it: ext4, btrfs, tmpfs
    mount: str
    total_bytes: int
    free_bytes: int


def host_bytes(root: Path = ROOT) -> int:
    """Memory that this process can have at most: what the machine has, or its control group."""
    limits = [limit for limit, _ in _memory_groups(root) if limit is not None]
    return min([memory_info("MemTotal", root), *limits])


def free_host_bytes(root: Path = ROOT) -> int:
    """Memory that this process may still take: what the machine has, or its control group."""
    free = memory_info("MemAvailable", root)
    for limit, used in _memory_groups(root):
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def memory_info(key: str, root: Path = ROOT) -> int:
    """Bytes that /proc/meminfo tells by this name. Raises OSError where it does not."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that control groups grant at most; None where they grant all."""
    quotas = []
    for group in _groups("cpu", root):
        words = read_text(group / "cpu.max").split()
        if not words:  # version 1 has a file for each
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read_text(group / name).strip() for name in files]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None) if quotas else None


def processor_name(root: Path = ROOT) -> str:
    """What this machine calls its processor."""
    names = re.findall(r"(?m)^model name\s*:\s*(.*)$", _cpuinfo(root))
    return names[0].strip() if names else platform.processor() or platform.machine()


def processor_flags(root: Path = ROOT) -> set[str]:
    """What the processors can do, as Linux names it."""
    found = re.findall(r"(?m)^(?:flags|Features)\s*:(.*)$", _cpuinfo(root))
    return set(" ".join(found).split())


def has_bfloat16(flags: Collection[str]) -> bool:
    """Whether processors with these flags compute in bfloat16. Others do it piece by piece, several
    times more slowly than in float32."""
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def mounts(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Where file systems are mounted, bind mounts too, and their kinds; in order. Raises OSError
    where Linux does not tell."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, behind = line.partition(" - ")
        escaped = before.split()[4]
        yield re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), escaped), behind.split()[0]


def file_system(path: str | Path, root: Path = ROOT) -> FileSystem:
    """The one that a folder lies on. Raises OSError where there is no such folder."""
    place = Path(path).resolve(strict=True)
    kind, mount = "", "/"
    for there, found in mounts(root):
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


def read_text(file: Path) -> str:
    """A file of /proc or /sys; "" where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo(root: Path) -> str:
    return read_text(root / "proc/cpuinfo")


def _memory_groups(root: Path) -> Iterator[tuple[int | None, int | None]]:
    """(limit, use) of the control groups of this process and all above it, versions 2 and 1."""
    for group in _groups("memory", root):
        for names in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            yield _number(group / names[0]), _number(group / names[1])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that have a controller, and of all above."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top / group.lstrip("/")
        # In a container the group is often mounted as the root itself.
        for place in [folder, *folder.parents]:
            if not place.is_relative_to(top):
                break
            yield place


def _number(file: Path) -> int | None:
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None  # "max": no limit
