"""Runs a program inside a real memory limit, by whichever means the machine has."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .common import MIB, BenchError

CGROUP = Path("/sys/fs/cgroup")

# Puts itself into the group, then becomes the program: not a byte is taken outside the limit.
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'

Prefix = list[str]
Limiter = Callable[[int], AbstractContextManager[Prefix]]
Runner = Callable[[Sequence[str], int], subprocess.CompletedProcess[str]]


@contextmanager
def _group(parent: Path, files: dict[str, int]) -> Iterator[Prefix]:
    folder = parent / f"strata-bench-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in files.items():
            if (folder / name).exists():  # the limit on swap is missing where there is no swap
                (folder / name).write_text(str(value))
        yield ["sh", "-c", JOIN, str(folder)]
    finally:
        folder.rmdir()


@contextmanager
def _version1(limit_bytes: int) -> Iterator[Prefix]:
    files = {
        "memory.limit_in_bytes": limit_bytes,
        "memory.memsw.limit_in_bytes": limit_bytes,
        "memory.swappiness": 0,
    }
    with _group(CGROUP / "memory", files) as prefix:
        yield prefix


@contextmanager
def _version2(limit_bytes: int) -> Iterator[Prefix]:
    if "memory" not in (CGROUP / "cgroup.subtree_control").read_text().split():
        (CGROUP / "cgroup.subtree_control").write_text("+memory")
    with _group(CGROUP, {"memory.max": limit_bytes, "memory.swap.max": 0}) as prefix:
        yield prefix


@contextmanager
def _systemd(limit_bytes: int) -> Iterator[Prefix]:
    if shutil.which("systemd-run") is None:
        raise OSError("no systemd-run")
    user = [] if os.geteuid() == 0 else ["--user"]
    limits = ["-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0"]
    yield ["systemd-run", "--scope", "--quiet", "--collect", *user, *limits, "--"]


def _holds(limiter: Limiter) -> bool:
    """Whether a program that fits its limit runs and one that does not is killed."""

    def takes(size: int) -> int:
        program = [sys.executable, "-S", "-c", f"len(bytearray(b'1') * {size})"]
        with limiter(64 * MIB) as prefix:
            return subprocess.run([*prefix, *program], capture_output=True, check=False).returncode

    try:
        return takes(1 * MIB) == 0 and takes(128 * MIB) != 0
    except OSError:
        return False


def limited_runner() -> Runner:
    """A function that runs a command inside a limit in bytes; -9 is its return code where the limit
    killed it. Raises BenchError where no means works.
    """
    limiter = next(filter(_holds, (_version1, _version2, _systemd)), None)
    if limiter is None:
        raise BenchError("no memory limit can be set: needs a cgroup that this user may write")

    def run(command: Sequence[str], limit_bytes: int) -> subprocess.CompletedProcess[str]:
        with limiter(limit_bytes) as prefix:
            return subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)

    return run
