"""What the kernel, and a container around this process, let it do. Needs no torch.

    reason = kernel.why_no_io_uring()          # "" where it works
    kernel.locked_bytes(), kernel.container(), kernel.huge_pages()

Functions take the `root` that /proc and /sys lie under, as those of machine.py do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from .machine import ROOT, read_text

IO_URING_SETUP = 425  # the number of the system call, on x86-64 and on Arm
PARAMS_BYTES = 120  # of the structure that it fills
IPC_LOCK = 14  # the bit of the capability to lock any amount of memory
# What a driver shows of itself to processes that may use its GPUs; the second one under WSL.
DRIVER_FILES = ("dev/nvidiactl", "dev/dxg")
# Files that a container has, by what made it.
CONTAINER_FILES = {".dockerenv": "Docker", "run/.containerenv": "Podman"}


def release(root: Path = ROOT) -> str:
    """The kernel's version, such as "6.12.5-amd64"."""
    return read_text(root / "proc/sys/kernel/osrelease").strip() or os.uname().release


def container(root: Path = ROOT) -> str:
    """What kind of container this process is in; "" where none can be seen."""
    for file, name in CONTAINER_FILES.items():
        if (root / file).exists():
            return name
    if named := read_text(root / "run/systemd/container").strip():
        return named
    if "microsoft" in release(root).lower():
        return "WSL"
    groups = read_text(root / "proc/self/cgroup")
    found = re.search(r"docker|kubepods|libpod|lxc|containerd", groups)
    return found[0] if found else ""


def why_no_io_uring(root: Path = ROOT, attempt: Callable[[], int] | None = None) -> str:
    """Why io_uring cannot be used, and what to do; "" where it can. `attempt` sets up a ring and
    returns an errno, or 0."""
    code = (attempt or set_up_ring)()
    if not code:
        return ""
    if code == errno.ENOSYS:
        return (
            f"the kernel ({release(root)}) has none, or a filter of system calls hides it: it "
            "takes Linux 5.1 or newer"
        )
    if code == errno.EPERM:
        return _forbidden(root)
    if code == errno.ENOMEM:
        return "the limit of locked memory is too small for a ring: raise `ulimit -l`"
    return f"a ring cannot be set up: {os.strerror(code)}"


def _forbidden(root: Path) -> str:
    setting = read_text(root / "proc/sys/kernel/io_uring_disabled").strip()
    if setting == "2":
        return "kernel.io_uring_disabled is 2, off for all: `sysctl kernel.io_uring_disabled=0`"
    if setting == "1":
        group = read_text(root / "proc/sys/kernel/io_uring_group").strip()
        return (
            f"kernel.io_uring_disabled is 1, and this process is not in group {group} "
            "(kernel.io_uring_group): join it, or `sysctl kernel.io_uring_disabled=0`"
        )
    where = container(root)
    if where:
        return (
            f"a filter of system calls forbids it, as {where} does by default: start the container "
            "with a seccomp profile that allows io_uring_setup, io_uring_enter and "
            "io_uring_register (--security-opt seccomp=FILE)"
        )
    return "a filter of system calls (seccomp) or a security module forbids it"


def set_up_ring() -> int:
    """Sets up a ring with one entry, and closes it. Returns an errno, or 0."""
    system = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(PARAMS_BYTES)
    ring = system.syscall(IO_URING_SETUP, 1, params)
    if ring < 0:
        return ctypes.get_errno()
    os.close(ring)
    return 0


def locked_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process may lock; None: as much as it likes."""
    found = re.search(r"(?m)^CapEff:\s*([0-9a-f]+)", read_text(root / "proc/self/status"))
    if found and int(found[1], 16) >> IPC_LOCK & 1:
        return None
    found = re.search(r"(?m)^Max locked memory\s+(\d+)", read_text(root / "proc/self/limits"))
    return int(found[1]) if found else None


def huge_pages(root: Path = ROOT) -> str:
    """When the kernel backs memory by huge pages: "always", "madvise" or "never"; "" where it has
    none."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def shows_gpus(root: Path = ROOT) -> bool:
    """Whether a driver shows a GPU to this process, whoever cannot use it."""
    return any((root / file).exists() for file in DRIVER_FILES)


def gpu_driver(root: Path = ROOT) -> str:
    """The version of NVIDIA's driver; "" where there is none."""
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", read_text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""
