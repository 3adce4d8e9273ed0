"""The complete snapshots whose slots a session holds, and when it gives them up.

    kept.add(identity, number, folder, link)      # its manifest is there
    kept.rotate(series, keep=2)                   # older ones are removed
    kept.drop_removed()                           # slots of those that somebody else has removed

A snapshot is there for as long as its links are: a user may have moved its folder. One whose pages
were copied has no links, and is there for as long as its manifest is. Use from the thread that
trains, and from that of its Taker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint_files import MANIFEST_NAME, CheckpointError, complete_at
from .series import finish_removals, remove_snapshot, snapshots_of

if TYPE_CHECKING:
    from ..._core import Session

log = logging.getLogger("strata")


@dataclass(frozen=True)
class _Kept:
    number: int  # the core's
    folder: Path  # where it was when it became complete
    sign: Path  # is there for as long as the snapshot is


class KeptSnapshots:
    """Of one session, by their ids."""

    def __init__(self, session: Session) -> None:
        """None so far."""
        self._session = session
        self._all: dict[str, _Kept] = {}
        self._left: set[Path] = set()  # that are no snapshots, and of which the log has told
        self._going: frozenset[Path] = frozenset()  # folders that rotate() removes now

    def __len__(self) -> int:
        """All series together."""
        return len(self._all)

    def numbers(self) -> set[int]:
        """The core's."""
        return {kept.number for kept in list(self._all.values())}

    def number_of(self, identity: str) -> int | None:
        """The core's, of a snapshot; None: no slots of it are held."""
        kept = self._all.get(identity)
        return None if kept is None else kept.number

    def add(self, identity: str, number: int, folder: Path, link: str) -> None:
        """Its manifest is in the folder. `link`: of its first page file; it need not be there."""
        sign = Path(link) if Path(link).exists() else folder / MANIFEST_NAME
        replaced = [i for i, kept in list(self._all.items()) if kept.sign == sign and i != identity]
        self._all[identity] = _Kept(number, folder, sign)
        for each in replaced:
            self._drop(each)

    def in_series(self, series: Path) -> int:
        """Those that are complete in its folder."""
        folders = {kept.folder for kept in list(self._all.values())}
        return sum(f.parent == series and complete_at(f) is not None for f in folders)

    def beside(self, series: Path) -> int:
        """Those of other series, and those that were moved out of this one. Threads: any, also
        while that of the Taker rotates: what is no more in its folder is looked for among those
        that go, and then among those that have gone, in the order in which they do."""
        folders, others = set(), 0
        for identity, kept in list(self._all.items()):
            in_series = kept.folder.parent == series and complete_at(kept.folder) is not None
            if in_series or kept.folder in self._going:
                others += kept.folder in folders  # it was moved away, and another one has its name
                folders.add(kept.folder)
            elif identity in self._all:
                others += 1
        return others

    def drop_removed(self) -> None:
        """Gives up the slots of those that are not there any more."""
        for identity, kept in list(self._all.items()):
            if not kept.sign.exists():
                self._drop(identity)

    def rotate(self, series: Path, keep: int) -> None:
        """Removes all but the newest. What is damaged, or is no snapshot, stays on the disk; its
        slots are given up, for nobody can load it."""
        finish_removals(series)
        olds = snapshots_of(series)[:-keep]
        self._going = frozenset(olds)
        try:
            for old in olds:
                self._remove(old)
            self.drop_removed()
        finally:
            self._going = frozenset()

    def _remove(self, old: Path) -> None:
        """One of a series, unless it is none."""
        try:
            remove_snapshot(old)
        except CheckpointError as error:
            if old not in self._left:
                log.warning("%s stays in the series: %s", old, error)
            self._left.add(old)
            ours = [i for i, kept in list(self._all.items()) if kept.folder == old]
            for identity in ours[-1:]:  # those before it were moved away
                self._drop(identity)

    def _drop(self, identity: str) -> None:
        kept = self._all.get(identity)  # another thread may have dropped it
        if kept is not None:
            self._session.drop_snapshot(kept.number)  # twice, after Ctrl-C, is no harm
            self._all.pop(identity, None)
