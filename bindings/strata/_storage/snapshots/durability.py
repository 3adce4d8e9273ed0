"""Whether what the page files hold can still be made durable.

    durability.check()                          # raises once a sync has failed
    with durability.watch(series):              # a sync that fails in it spoils what is to come
        durability.sync_pages(session)
    durability.note(folder)                     # it is complete, and on the disk

Note [Lost writes are told once]. Where the kernel cannot write something back, the next fsync or
fdatasync of that file says so, once. What could not be written is dropped, and later ones succeed:
they would call a page durable that is not on the drive. So one failure on a drive of page files, of
the files, or of the folder and the files that name them, ends the snapshots of a session: all of
them are slots of the same files. Where the manifest, or another file of a series, cannot be synced,
nothing is lost but that snapshot: the next one writes files of its own. Training goes on: pages
that it reads are verified.

Use from the thread that trains, and from that of its Taker.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..._errors import StrataError
from ..checkpoint_files import complete_at
from ..replacing import SyncError
from .format import LINKS
from .series import snapshots_of

if TYPE_CHECKING:
    from ..._core import Session

NOTHING_WAS_SYNCED = (0, errno.EMFILE)  # the session has ended; no descriptor was left


class Durability:
    """Of the page files of one session."""

    def __init__(self, drives: Sequence[str]) -> None:
        """No sync has failed. `drives`: the folders of `ssd_path`."""
        self._drives = drives
        self._newest: Path | None = None  # that became complete here
        self._failed: set[Path] = set()  # of which a manifest may be there nevertheless
        self._lost = ""  # what is to be said from now on

    def check(self) -> None:
        """Raises StrataError where a sync has failed."""
        if self._lost:
            raise self._error()

    def note(self, folder: Path) -> None:
        """The snapshot in the folder is complete, and on the disk."""
        self._newest = folder
        self._failed.discard(folder)

    def note_failure(self, folder: Path) -> None:
        """Something of the snapshot has failed. Its manifest may be there, but need not be on the
        disk, unless it was complete before."""
        if folder != self._newest:
            self._failed.add(folder)

    def sync_pages(self, session: Session) -> None:
        """Waits until the drives have all pages that were written. Raises SyncError where that
        failed, and StrataError where it was not tried."""
        try:
            session.make_pages_durable()
        except StrataError as error:
            if error.errno in NOTHING_WAS_SYNCED:
                raise
            what = os.strerror(error.errno)
            raise SyncError(error.errno, what, self._drives[0]) from error

    @contextlib.contextmanager
    def watch(self, series: Path) -> Iterator[None]:
        """Raises StrataError for a sync that fails inside, and from now on in check(), where that
        concerns the page files. `series`: that a snapshot of it is taken of."""
        try:
            yield
        except SyncError as error:
            if not self._concerns(Path(error.filename)):
                raise
            self._lost = self._told(error, series)
            raise self._error() from error

    def _concerns(self, path: Path) -> bool:
        folders = (Path(drive) for drive in self._drives)
        return any(path == folder or path.is_relative_to(folder / LINKS) for folder in folders)

    def _told(self, error: SyncError, series: Path) -> str:
        newest = self._newest_durable(series)
        if newest is None:
            go_on = f"No snapshot in {series} is known to be durable"
        else:
            go_on = f"The newest snapshot that is durable is {newest}"
        return (
            f"pages on {', '.join(self._drives)} could not be made durable ({error.strerror}). The "
            "kernel tells of lost writes once, so later snapshots of this run could hold pages "
            "that are not on the drive: there are none from here on. What is trained in memory "
            f"goes on being right. {go_on}. Stop, look at the drive (dmesg, smartctl), and go on "
            "from that snapshot with strata.load() in a new run; strata.save() to another "
            "drive keeps what there is now, verified"
        )

    def _newest_durable(self, series: Path) -> Path | None:
        if self._newest is not None and complete_at(self._newest) is not None:
            return self._newest
        others = [folder for folder in snapshots_of(series) if folder not in self._failed]
        return others[-1] if others else None

    def _error(self) -> StrataError:
        error = StrataError(self._lost)
        error.fault = "io"
        return error
