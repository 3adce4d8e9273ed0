"""The folders of ssd_path=: one run at a time is in each, and the next one removes what a dead one
left there.

    remove_leftovers(paths)       # of processes that are dead; says so in the log
    claim = Claim()
    claim.take(options)           # with several ranks: no other run is in their folders from now on
    claim.close()
    for drive in rank_folders(path): ...

Note [Lock of a run]. A session locks the folder that it writes to (directory_lock.hpp). That is
ssd_path where a process is alone, and rank-0, rank-1, ... in it for several ranks. So each rank
also shares the lock of ssd_path itself, which ends with the process as any flock() does. The first
line of the lock file is a holder, as the core writes and reads it; each rank adds a line of its
own: "run <run> <holder>". Who may only share the lock may stay where all living holders are of its
own run. Who has it alone knows that all ranks which were there are dead, and removes their folders
before it lets others in.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._config.machine import boot_id, pid_namespace
from .._core import open_lock_file
from .._core import remove_leftovers as remove_leftovers_in
from .._errors import StrataError

if TYPE_CHECKING:
    from .._config.options import Options
    from .._config.ranks import Ranks

LOCK_NAME = "strata.lock"
RANK_FOLDER = re.compile(r"rank-\d+")
RUN = "run "  # what the lines of ranks begin with
PATIENCE_S = 5.0  # while another one cleans up, or what holds the lock is nobody who lives
PAUSE_S = 0.01

log = logging.getLogger("strata")


def remove_leftovers(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Removes those in `paths` whose processes are dead, and says so in the log.

    To be called before anybody looks at what the disk has free.
    """
    for path in map(Path, paths):
        _remove_files(path)
        if not list(rank_folders(path)):
            continue
        # Where it is not ours to write to, a session there would say so.
        with contextlib.suppress(OSError, StrataError):
            file = open_lock_file(os.fspath(path))
            try:
                if _lock(file, fcntl.LOCK_EX) and _is_named(file, path):
                    _remove_rank_folders(path)
                    if os.fstat(file).st_size == 0:
                        os.unlink(path / LOCK_NAME)
            finally:
                os.close(file)


class Claim:
    """Keeps other runs out of the folders that several ranks of this one use. Use from one thread.

    A process that is alone needs none: its session locks the folders themselves."""

    def __init__(self) -> None:
        """Claims nothing yet."""
        self._held: list[tuple[int, Path]] = []
        self._owner = os.getpid()

    def take(self, options: Options) -> None:
        """Raises StrataError where another run is in one of the folders, with the process that is
        there."""
        ranks = options.ranks
        if ranks is None:
            return
        for folder in options.ssd_paths():
            self._hold(Path(folder), ranks)

    def close(self) -> None:
        """Lets others in. REQUIRES: the session is closed. Does nothing in a forked child, which
        has the same lock, nor the second time."""
        held, self._held = self._held, []
        for file, folder in held:
            alone = os.getpid() == self._owner and _lock(file, fcntl.LOCK_EX)
            if alone and _is_named(file, folder):
                with contextlib.suppress(OSError):
                    os.unlink(folder / LOCK_NAME)
            os.close(file)

    def _hold(self, folder: Path, ranks: Ranks) -> None:
        end = time.monotonic() + PATIENCE_S
        try:
            while not self._try(folder, ranks):
                if time.monotonic() > end:
                    raise StrataError(
                        f"the SSD path {folder} is locked ({folder / LOCK_NAME}) by a process "
                        "that ended but whose children live on; end them or choose another path"
                    )
                time.sleep(PAUSE_S)
        except OSError as error:
            raise StrataError(f"the SSD path {folder} cannot be locked: {error}") from error

    def _try(self, folder: Path, ranks: Ranks) -> bool:
        """Whether the lock is held. Raises StrataError where another run holds it."""
        file = open_lock_file(os.fspath(folder))
        line = f"{RUN}{ranks.run} {_process(os.getpid())}\n"
        try:
            # 1. Alone: whoever was here is dead.
            if _lock(file, fcntl.LOCK_EX) and _is_named(file, folder):
                if os.fstat(file).st_size:
                    fcntl.flock(file, fcntl.LOCK_UN)
                    _remove_files(folder)
                    return False
                _remove_rank_folders(folder)
                os.write(file, f"{_process(os.getpid())}\n{line}".encode())
            # 2. With others, who have to be of this run. Until here one may have slipped in.
            if not _lock(file, fcntl.LOCK_SH) or not _is_named(file, folder):
                return False
            text = os.pread(file, os.fstat(file).st_size, 0).decode()
            holders = _holders(text)
            for holder in holders:
                if not holder.is_of(ranks) and holder.lives:
                    raise StrataError(
                        f"the SSD path {folder} is in use by process {holder.pid} "
                        f"({folder / LOCK_NAME}); wait for it to end or choose another path"
                    )
            if not any(holder.is_of(ranks) for holder in holders):
                return False
            if line not in text:
                os.write(file, line.encode())
            self._held.append((file, folder))
            file = -1
            return True
        finally:
            if file >= 0:
                os.close(file)


@dataclass(frozen=True)
class _Holder:
    """Who says in a lock file that it is there."""

    process: str
    runs: tuple[str, ...]  # none: it is alone

    @property
    def pid(self) -> int:
        return int(self.process.split()[0])

    def is_of(self, ranks: Ranks) -> bool:
        """Whether it is a process of this run: that of a model before counts, too."""
        here = self.process == _process(self.pid)
        return ranks.run in self.runs or (here and self.pid in ranks.pids)

    @property
    def lives(self) -> bool:
        """Or may do so, where its number means nothing here."""
        if self.process.split()[1:2] != [pid_namespace()]:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _process(pid: int) -> str:
    """One of this machine, as the core names it in its lock files."""
    return f"{pid} {pid_namespace()} {socket.gethostname()} {boot_id()}"


def _holders(text: str) -> list[_Holder]:
    """By process, the first line's ahead."""
    first, *others = text.splitlines() or [""]
    runs: dict[str, list[str]] = {first: []}
    for line in others:
        run, _, process = line.removeprefix(RUN).partition(" ")
        if line.startswith(RUN):
            runs.setdefault(process, []).append(run)
    named = {of: its for of, its in runs.items() if of.split(" ")[0].isdigit()}
    return [_Holder(process, tuple(its)) for process, its in named.items()]


def _lock(file: int, how: int) -> bool:
    """At once, or not at all; another lock that the file had is gone then."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(file: int, folder: Path) -> bool:
    """Whether its name still stands for it: the last holder removes it."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(folder / LOCK_NAME))
    except FileNotFoundError:
        return False


def _remove_files(folder: Path) -> None:
    for removed in remove_leftovers_in(os.fspath(folder)):
        log.warning("%s", removed)


def rank_folders(folder: Path) -> Iterator[Path]:
    """Those in one of ssd_path=: of ranks of this run, and of earlier ones."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if RANK_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def _remove_rank_folders(folder: Path) -> None:
    """Those that have something else, such as snapshots, stay. REQUIRES: the lock of the folder is
    ours alone."""
    for path in rank_folders(folder):
        _remove_files(path)
        with contextlib.suppress(OSError):
            path.rmdir()
