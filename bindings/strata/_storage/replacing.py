"""Work folders: where files are written that will take the place of others.

    with WorkFolder(parent, "run") as work:            # parent/run.strata-k3x9a2qd
        ...                                            # fill work.path, rename, empty it
    for left in dead_folders(parent, "run"):           # of processes that were killed
        remove(left)
    remove_unmarked(parent, "run")                     # likewise

Each has a name that nobody else can have, and a marker inside, by which alone it is known to be
ours: files and folders of the user are never touched, whatever they are called.

Note [Who is dead]. The marker is locked (flock) for as long as its process lives, however that
ends. A process number would say less: in containers it is often 1, and means nothing outside. A
lock may not be seen across machines, so a folder is only judged on the machine, and in the boot,
that it was made in; others are left alone, with a warning. A process that is killed before it has
marked its folder leaves an empty one. Nobody can tell whose that is, so whoever cleans up removes
it, and a process that still lives makes another.

Use from one thread at a time.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .._config import machine
from .._config.sizes import format_size
from .._schema import Form, FormError, parsed

MARKER_NAME = "strata-work.json"
PREFIX_END = ".strata-"
HALF_END = ".tmp"  # of a file that is being written
UNMARKED = re.compile(r"[a-z0-9_]{8}")  # as tempfile ends names
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ATTEMPTS = 10  # to have a folder that nobody takes away before it is marked

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Marker:
    """What is in the marker of a work folder."""

    strata: str  # MARK
    target: str
    boot: str
    host: str
    pid: int


MARK = "work folder"
MARKER = Form(Marker)


class SyncError(OSError):
    """The disk could not be made to have what was written. Its `filename` says of what."""


class WorkFolder(contextlib.AbstractContextManager["WorkFolder"]):
    """A new folder in `parent`, for work on `target`. It is not removed on leaving: who filled it
    knows what in it is still needed."""

    def __init__(self, parent: Path, target: str) -> None:
        """Makes and marks it. Raises OSError where `parent` cannot be written to."""
        for left in reversed(range(ATTEMPTS)):
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=parent))
            try:
                self._marker = _mark(self.path, target)
                return
            except BaseException as error:
                shutil.rmtree(self.path, ignore_errors=True)
                # See Note [Who is dead]: somebody has taken it for a dead one's.
                if not isinstance(error, FileNotFoundError) or left == 0:
                    raise

    def __exit__(self, *_: object) -> None:
        """From here on the folder, if it is still there, is a leftover."""
        os.close(self._marker)


def targets_of_work(parent: Path) -> list[str]:
    """What the work folders of `parent` are for."""
    names = (entry.name.rpartition(PREFIX_END)[0] for entry in parent.iterdir())
    return [name for name in names if name and work_folders(parent, name)]


def work_folders(parent: Path, target: str) -> list[Path]:
    """All that are marked as ours, of whatever process."""
    return [folder for folder, _ in _marked(parent, target)]


def dead_folders(
    parent: Path, target: str, is_dead: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Those whose process is dead, one after the other, to be removed. See Note [Who is dead].
    `is_dead`: of a folder of which something else says so, such as a lock that was its process's.
    """
    here = _boot()
    for folder, marker in _marked(parent, target):
        if (not here or marker.boot != here) and not is_dead(folder):
            log.warning(
                "%s was left by process %s of %s, before a reboot or on another machine: remove it "
                "if nobody writes there any more",
                folder,
                marker.pid,
                marker.host,
            )
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, or locked: somebody lives
            descriptor = os.open(folder / MARKER_NAME, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a work folder; the marker last, so that it is known to be ours to the end."""
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != MARKER_NAME:
            entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # what could not be removed stays, and is known to be ours
        if [entry.name for entry in folder.iterdir()] == [MARKER_NAME]:
            (folder / MARKER_NAME).unlink()
        folder.rmdir()


def remove_unmarked(parent: Path, target: str) -> None:
    """Removes work folders for `target` whose process was killed before it marked them, or behind
    the removal of the marker: empty ones."""
    for folder in parent.iterdir() if parent.is_dir() else []:
        if folder.name.startswith(_prefix(target)) and UNMARKED.fullmatch(
            folder.name[len(_prefix(target)) :]
        ):
            with contextlib.suppress(OSError):  # it is not empty, or no folder
                (folder / f"{MARKER_NAME}.tmp").unlink(missing_ok=True)
                folder.rmdir()


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted on `path`, which can then not be renamed; a bind mount, too."""
    if os.path.ismount(path):
        return True
    try:
        return str(path) in (there for there, _ in machine.mounts())
    except OSError:
        return False


@contextlib.contextmanager
def writing(path: Path, byte_count: int | None = None) -> Iterator[None]:
    """Around the writing of a file or a folder. Where there is no room, the error of the system
    says neither where nor for what: the OSError that is raised in its place names `path`, what it
    takes, if that is known, and what is free."""
    try:
        yield
    except Exception as error:
        code = no_room(error)
        if code is None or getattr(error, "filename", None) is not None:
            raise
        takes = f"it takes {format_size(byte_count)}, and " if byte_count is not None else ""
        if code == errno.EFBIG:
            why = f"{takes}the file system or `ulimit -f` allows no file as large"
        else:
            place = next(folder for folder in path.absolute().parents if folder.is_dir())
            why = f"{takes}{format_size(machine.free_disk_bytes([str(place)]))} are free there"
        raise OSError(code, f"{os.strerror(code)} ({why})", str(path)) from error


def no_room(error: BaseException) -> int | None:
    """Which of NO_ROOM it tells of, or what it was raised from. Libraries that are written in Rust
    raise classes of their own, with the number in the text."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return error.errno
    told = re.search(r"os error (\d+)", str(error))
    if told and int(told[1]) in NO_ROOM:
        return int(told[1])
    return no_room(error.__cause__) if error.__cause__ is not None else None


def write_text(path: Path, text: str) -> None:
    """Writes a file in place, in UTF-8."""
    content = text.encode()
    with writing(path, len(content)):
        path.write_bytes(content)


def write_whole(path: Path, text: str, durable: bool = True) -> None:
    """Writes a file. Killed at any moment, there is the old one or the whole new one. `durable`:
    what was written is on the disk then. What comes before has a name that nobody else can have:
    no link is followed, and no file of the user's is emptied."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{HALF_END}")
    content = text.encode()
    with writing(path, len(content)), open(temporary, "xb") as file:
        try:
            file.write(content)
            file.flush()
            if durable:
                sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def make_newest(path: Path, others: Iterable[Path]) -> None:
    """Has a file that was just written be the newest of its kind by its time, also where the clock
    was set back since the others were written. Some may be gone meanwhile."""
    times = []
    for other in others:
        with contextlib.suppress(OSError):
            times.append(other.stat().st_mtime_ns)
    if times and path.stat().st_mtime_ns <= max(times):
        os.utime(path, ns=(max(times) + 1,) * 2)
        sync(path)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, where they are not there; their names are on the disk.
    Raises OSError, and has made none then."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    try:
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # somebody has put something there
            path.rmdir()  # else the next one would take its name to be on the disk
        raise


def sync(path: Path) -> None:
    """Waits until what was written to a file, or the names in a folder, are on the disk. Raises
    SyncError where they are not, and OSError where it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise SyncError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _prefix(target: str) -> str:
    return f"{target}{PREFIX_END}"


def _boot() -> str:
    """What no other machine has, and this one not after its next start; empty: unknown."""
    try:
        return machine.boot_id()
    except OSError:
        return ""


def _mark(folder: Path, target: str) -> int:
    """Writes the marker and returns the descriptor that holds its lock."""
    marker = Marker(MARK, target, _boot(), socket.gethostname(), os.getpid())
    # It appears locked: nobody can find a marker whose process only seems to be dead.
    temporary = folder / f"{MARKER_NAME}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # no locks here: then nobody else can take one either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(marker)).encode())
        os.rename(temporary, folder / MARKER_NAME)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _marked(parent: Path, target: str) -> list[tuple[Path, Marker]]:
    """The work folders for `target`, with what their markers say."""
    if not parent.is_dir():
        return []
    found = []
    for folder in sorted(parent.iterdir()):
        if not folder.name.startswith(_prefix(target)) or folder.is_symlink():
            continue
        try:
            marker = MARKER.read(parsed((folder / MARKER_NAME).read_bytes()))
        except (OSError, FormError):
            continue
        if marker.strata == MARK and marker.target == target:
            found.append((folder, marker))
    return found
