"""Snapshots of several machines: what ranks do that do not see rank 0's folder of the series.

    copies = Copies(identity, new, together, board)
    with copies.meeting(folder, make_links):
        copies.place()                              # the folder that this rank sees
    copies.send_part()                              # ranks that do not see rank 0's
    copies.take_parts(new)                          # rank 0
    copies.send(new)                                # rank 0
    copies.take(new, folder)                        # the first rank of each folder
    recover(board, drives, together, cleans)        # what a killed run left between two machines
    folder = newest_of_all(found, path, together)   # to load
    readers = readers_of(manifest, folder, together)

Note [A copy for each machine]. Nothing but the network need be shared: `ssd_path` is each machine's
own, and the folder of the series may be. Where the first rank of a machine does not see what rank 0
has made, it makes a folder of its own, and every rank takes the first one that it sees. Where that
is not rank 0's, parts go to rank 0 through the board, and the files of the snapshot come back, to
the rank that has made the folder. Where all see rank 0's there is that one alone.

Note [When it counts]. When rank 0 has the manifest. Ahead of that all parts, all links and all
copies of the files are on the disks; behind it the copies take their places. Killed in between, a
machine may lack its copy, and cannot know: its links are pending, and the next run there asks
rank 0 for what counts, and for the files. Older snapshots are removed once all machines have their
copies: by rank 0, and then each other rank removes its links, which it has marked as pending ahead
of that. So at any moment there is one that all of them have, and strata.load() takes the newest.

Note [Who reads for whom]. A rank whose pages are adopted needs no disk but its own. Else each rank
reads what it owns from where that lies; what some rank of the run cannot reach, the first one that
can reads for all, and sends it to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoint_files import MANIFEST_NAME, STATE_NAME, CheckpointError, read_manifest
from ..rank_board import Board
from ..replacing import WorkFolder, make_folder, make_newest, remove, sync
from ..ssd_folders import rank_folders
from ..together import Together
from .format import LINKS, id_at
from .links import link_owner
from .pages import lies_here, unreachable
from .parts import part_files
from .series import clean_up, snapshots_of, taking_place, unknown_on

COPIED = (STATE_NAME, MANIFEST_NAME)  # the manifest last

log = logging.getLogger("strata")


class Copies:
    """Of one snapshot, on their way between ranks that do not see the same folder."""

    def __init__(
        self, identity: str, new: str, together: Together, board: Board | None = None
    ) -> None:
        """`new`: the path of rank 0's folder."""
        self._id, self._together, self._board = identity, together, board
        self._places = {0: Path(new)}  # by rank that has one
        self.of = -1  # the rank whose folder this one sees
        self._of: list[int] = []  # by rank

    @contextlib.contextmanager
    def meeting(self, folder: Path, ahead: Callable[[], object]) -> Iterator[None]:
        """Where rank 0's folder is not seen, the first rank of a machine makes another one for as
        long as this is open. `folder`: of the snapshot; `ahead` makes the links, which tell a later
        run of the folder. All ranks call it."""
        with contextlib.ExitStack() as stack:
            if self._together.machines:
                with self._together.phase() as phase:
                    if self._together.turn == 1 and not self._places[0].is_dir():
                        ahead()
                        make_folder(folder.parent)
                        work = stack.enter_context(WorkFolder(folder.parent, folder.name))
                        stack.callback(remove, work.path)
                        phase.said = str(work.path)
                found = enumerate(phase.heard)
                self._places |= {rank: Path(place) for rank, place in found if place}
            yield

    def place(self) -> Path:
        """The first folder that this rank sees. Raises CheckpointError."""
        self.of = next((rank for rank, path in self._places.items() if path.is_dir()), -1)
        if self.of < 0:
            raise CheckpointError(
                f"rank {self._together.rank} sees {self._places[0].parent} neither as rank 0 does "
                "nor as the first rank of its machine does"
            )
        return self._places[self.of]

    def hear(self, of: list[int]) -> None:
        """By rank: of whose folder each is."""
        self._of = of

    @property
    def needed(self) -> bool:
        """Whether there are ranks that do not see rank 0's folder."""
        return any(self._of)

    @property
    def mine(self) -> bool:
        """Whether this rank has one put into its place."""
        return 0 < self.of == self._together.rank

    def send_part(self) -> None:
        """What this rank has put into its place, if that is not rank 0's."""
        if self.of == 0 or self._board is None:
            return
        for path in part_files(self._places[self.of], self._together.rank):
            self._board.send(self._key(path.name), path)

    def take_parts(self, new: Path) -> None:
        """Of those that do not see rank 0's folder, to that."""
        for rank in (rank for rank, of in enumerate(self._of) if of > 0):
            for path in part_files(new, rank):
                assert self._board is not None
                self._board.take(self._key(path.name), rank, path)

    def send(self, folder: Path) -> None:
        """The files of the snapshot, to all that will take them."""
        if self._board is None or not self.needed:
            return
        for name in COPIED:
            self._board.send(self._key(name), folder / name)

    def take(self, new: Path, folder: Path) -> None:
        """To a new folder, which is to take the place of `folder`. Raises CheckpointError where
        they have not come whole."""
        assert self._board is not None
        for name in COPIED:
            self._board.take(self._key(name), 0, new / name)
        if read_manifest(new).get("id") != self._id:
            raise CheckpointError(f"rank 0 sent another manifest than that of {self._id}")
        sync(new)
        make_newest_of(folder.parent, new)

    def _key(self, name: str) -> str:
        return f"{self._id}/{name}"


def make_newest_of(series: Path, new: Path) -> None:
    """The manifest in a new folder is the newest of its series."""
    make_newest(new / MANIFEST_NAME, [each / MANIFEST_NAME for each in snapshots_of(series)])


def recover(board: Board | None, drives: list[str], together: Together, cleans: bool) -> None:
    """Removes what killed processes left on the drives, ahead of what looks at the links there; see
    Note [When it counts]. All ranks call it. `board`: of several; `cleans`: this one has to.
    REQUIRES: no snapshot is under way."""
    if board is None or not together.machines:
        for turn in together.turns:
            with together.phase():
                if cleans and together.turn == turn:
                    _clean_up(drives, together)
        return
    # 1. Rank 0 knows what counts. The others name what they do not know of.
    with together.phase() as phase:
        if together.turn == 0 and cleans:
            _clean_up(drives, together)
        asked = unknown_on([*drives, *_abandoned(drives, together)]) if cleans else {}
        phase.said = {identity: id_at(folder) == identity for identity, folder in asked.items()}
    # 2. It sends the files of what somebody lacks.
    wanted = sorted({i for said in phase.heard[1:] for i, there in said.items() if not there})
    with together.phase() as phase:
        phase.said = []
        for identity in wanted if together.leads and drives else ():
            folder = link_owner(Path(drives[0]), identity)
            if folder is not None and id_at(folder) == identity:
                _all_lack(identity, together, board).send(folder)
                phase.said.append(identity)
    counted = set(phase.heard[0])
    # 3. The first of each other machine puts them where they belong, and then its other ranks look.
    for turn in together.turns[1:]:
        with together.phase():
            if together.turn != turn or not cleans:
                continue
            for identity, folder in asked.items() if turn == 1 else ():
                if identity in counted and id_at(folder) != identity:
                    with taking_place(folder) as new:
                        _all_lack(identity, together, board).take(new, folder)
                    log.info("%s is complete on other machines, and now here", folder)
            _clean_up(drives, together)
    board.forget_sent()


def _clean_up(drives: list[str], together: Together) -> None:
    """Of this rank, and where it is the first of its machine, what nobody has any more."""
    abandoned = _abandoned(drives, together)
    clean_up([*drives, *abandoned], clears=together.turn < 2)
    for folder in abandoned:
        with contextlib.suppress(OSError):  # a complete snapshot has links there
            os.rmdir(folder)


def _abandoned(drives: list[str], together: Together) -> list[str]:
    """What an earlier run of other ranks, or of one process, had beside the drives, for the first
    rank of a machine. REQUIRES: this run alone is in these folders."""
    if together.turn == 2:
        return []
    ours = {f"rank-{rank}" for rank in together.here} if together.count > 1 else set()
    found: list[Path] = []
    for drive in map(Path, drives):
        home = drive.parent if ours else drive
        found += [home] if ours else []
        found += [folder for folder in rank_folders(home) if folder.name not in ours]
    return [str(folder) for folder in found if (folder / LINKS).is_dir()]


def _all_lack(identity: str, together: Together, board: Board) -> Copies:
    copies = Copies(identity, "", together, board)
    copies.hear(list(range(together.count)))
    return copies


def newest_of_all(found: list[Path], path: Path, together: Together) -> Path | None:
    """Of the snapshots that each rank has found at the path, the newest first: the newest one of
    rank 0 that all of them have; None: none of them has any. Raises CheckpointError."""
    with together.phase() as phase:
        ids = [id_at(folder) for folder in found]
        if ids and ids[0] is None:
            read_manifest(found[0])  # says what is wrong with it
        phase.said = {"path": str(path), "ids": ids, "names": [folder.name for folder in found]}
    heard = phase.heard
    for newest, name in zip(heard[0]["ids"], heard[0]["names"], strict=True):
        if newest is None or not all(newest in said["ids"] for said in heard):
            continue
        if newest != heard[0]["ids"][0]:
            log.warning(
                "%s of %s is not on all machines: going on from %s",
                heard[0]["names"][0],
                heard[0]["path"],
                name,
            )
        return found[ids.index(newest)]
    if not any(said["ids"] for said in heard):
        return None
    there = (
        f"rank {rank}{together.machine(rank)} has {' and '.join(said['names']) or 'none'} in "
        f"{said['path']}"
        for rank, said in enumerate(heard)
        if together.turn_of(rank) < 2
    )
    raise CheckpointError(
        f"no snapshot is there for all ranks: {'; '.join(there)}. Each machine has a copy of the "
        "manifests where its own path= said, or all see one folder: start on the machines that "
        "took it, with the path of each"
    )


def readers_of(manifest: dict[str, Any], folder: Path, together: Together) -> dict[int, int]:
    """By rank of those that took the snapshot: the rank of this run that reads for all what that
    one had; none: each reads for itself. All ranks call it. Raises CheckpointError where no rank
    reaches it; see Note [Who reads for whom]."""
    with together.phase() as phase:
        phase.said = lies_here(manifest, folder)
    readers: dict[int, int] = {}
    for part in range(len(phase.said)):
        reach = [said[part] for said in phase.heard]
        if not any(reach):
            who = "no rank of this run" if together.count > 1 else "nobody here"
            raise CheckpointError(unreachable(manifest, folder, part, who))
        if not all(reach):
            readers[part] = reach.index(True)
    return readers
