"""Brings one snapshot to the disk by all ranks of a run: each takes the steps of commit.py.

    commit = RankCommit(Commit(...), together, board)
    commit.run(cleans=False)                     # waits; on a thread

Note [One commit]. Each rank holds the slots of what it owns, and links its own page files. A
snapshot is one manifest that names all of them.
    1. Rank 0 removes what killed processes left, and then the others do.
    2. Each rank has its state captured, and its pages on the disk.
    3. Rank 0 makes the new folder.
    4. Each rank links its page files, waits until the disk has the names, and says what lies where
       (parts.py).
    5. When all have, rank 0 writes the manifest to the new folder. Machines that do not see it get
       a copy of their own (machines.py).
    6. Rank 0's folder takes its place.
    7. So do the copies.
    8. The other ranks note that their links stay. Then older snapshots are removed, on all
       machines.
Each phase ends for all ranks, or for none (../together.py). Up to the end of phase 5 there is no
manifest in its place, and so a rank that fails takes its links away. From there on rank 0 alone
decides: a rank that does not hear of it leaves its links as they are, and marked as pending. The
next run on these drives sees whether a manifest needs them.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_files import CheckpointError, TensorWriter
from ..rank_board import Board
from ..replacing import writing
from ..together import Together
from .commit import Commit
from .format import id_at
from .links import mark_going, remove_links
from .machines import Copies, recover
from .parts import join_part, write_part
from .series import snapshots_of, taking_place

if TYPE_CHECKING:
    from ..._core import TakenSnapshot


class RankCommit:
    """Of one rank, and one snapshot."""

    def __init__(self, commit: Commit, together: Together, board: Board) -> None:
        """`commit`: what this rank does of it."""
        self._commit, self._together, self._board = commit, together, board
        self._decided = True  # this rank knows whether there is a manifest

    def run(self, cleans: bool) -> None:
        """Returns when it is complete. See Note [One commit]."""
        commit = self._commit
        recover(self._board, commit.drives, self._together, cleans)
        self._rotate(commit.are_too_many)
        with self._together.phase() as phase:
            pages = commit.capture()
            phase.said = len(commit.drives)
        try:
            self._write(pages, phase.heard)
            with self._together.phase():
                if not self._together.leads:
                    commit.finish()
        except BaseException:
            commit.give_up(self._decided)
            raise
        self._rotate(True)
        self._board.forget_sent()

    def _write(self, pages: TakenSnapshot, drives: list[int]) -> None:
        """`drives`: how many each rank has."""
        commit, folder, together = self._commit, self._commit.asked.folder, self._together
        with writing(folder), contextlib.ExitStack() as stack:
            # 3. The new folder.
            with together.phase() as phase:
                if together.leads:
                    links = commit.make_links()
                    new = stack.enter_context(taking_place(folder))
                    phase.said = [links.id, str(new)]
            identity, made = phase.heard[0]
            copies = Copies(identity, made, together, self._board)
            # 4. The parts.
            make_links = partial(commit.make_links, identity)
            with copies.meeting(folder, make_links), together.phase() as phase:
                place, first = copies.place(), sum(drives[: together.rank])
                make_links()
                entries = commit.keep_pages(pages, place, first)
                self._refuse_copies(entries)
                if not together.leads:
                    write_part(place, together.rank, pages, commit.asked.context)
                    copies.send_part()
                phase.said = {"drives": entries, "of": copies.of}
            copies.hear([said["of"] for said in phase.heard])
            # 5. The manifest, and its copies.
            with together.phase():
                if together.leads:
                    copies.take_parts(new)
                    entries = [entry for said in phase.heard for entry in said["drives"]]
                    manifest = commit.manifest(pages) | {"drives": entries}
                    commit.write_folder(new, manifest, partial(self._join, new, drives))
                    copies.send(new)
            if copies.needed:
                with together.phase():
                    if copies.mine:
                        copies.take(stack.enter_context(taking_place(folder)), folder)
            # 6. It counts.
            self._decided = together.leads
            try:
                with together.phase():
                    if together.leads:
                        stack.close()
                        commit.finish()
            except CheckpointError:
                self._decided |= copies.of == 0  # rank 0 has ended it, and the folder says how
                raise
            # 7. So it does on all machines.
            if copies.needed:
                with together.phase():
                    stack.close()
        self._decided = True

    def _join(
        self, new: Path, drives: list[int], manifest: dict[str, Any], file: TensorWriter
    ) -> None:
        """What the other ranks have said in the new folder. `drives`: how many each rank has."""
        manifest["ranks"] = drives
        if self._together.machines:
            manifest |= {"machines": list(self._together.machines), "copies": []}
        for chunk in manifest["chunks"]:
            if chunk is not None:
                chunk["rank"] = 0
        others = range(1, self._together.count)
        manifest["others"] = [join_part(new, rank, manifest, file) for rank in others]

    def _refuse_copies(self, entries: list[dict[str, str]]) -> None:
        if self._together.machines and not all(entry["folder"] for entry in entries):
            raise CheckpointError(
                f"the file systems of {', '.join(self._commit.drives)} have no hard links, which "
                "snapshots of several machines need: use strata.save()"
            )

    def _rotate(self, wanted: bool) -> None:
        """Removes older ones, if rank 0 wants it: the last time that may have failed. So does any
        other machine: one where that was cut short, or that others have gone on without, has more
        than rank 0's."""
        kept, together = self._commit.kept, self._together
        series, keep = self._commit.asked.series, self._commit.asked.keep
        with together.phase() as phase:
            if together.machines:
                self._commit.durability.check()
                olds = kept.outdated(series, keep) if together.leads else []
                phase.said = {"wanted": wanted, "outdated": [id_at(each) for each in olds]}
            else:
                self._commit.rotate(wanted and together.leads)
        if together.machines:
            wanted = any(said["wanted"] for said in phase.heard)
            outdated = phase.heard[0]["outdated"] if wanted else []
            self._rotate_machines([identity for identity in outdated if identity], wanted)
        if not together.leads:
            kept.drop_removed()

    def _rotate_machines(self, going: list[str], wanted: bool) -> None:
        """Who is killed from here on leaves links that the next run removes; also of what others
        have removed on rank 0's machine meanwhile."""
        kept, drives = self._commit.kept, self._commit.drives
        series, keep = self._commit.asked.series, self._commit.asked.keep
        with self._together.phase():
            if not self._together.leads:
                mark_going(drives, going)
        with self._together.phase() as phase:
            if self._together.leads:
                kept.drop_removed()
                if wanted:
                    kept.rotate(series, keep)
                left = [id_at(each) for each in snapshots_of(series)] if wanted else None
                phase.said = {"left": left, "gone": kept.take_gone()}
        left, gone = phase.heard[0]["left"], phase.heard[0]["gone"]
        with self._together.phase():
            if self._together.turn == 1 and left is not None:
                kept.rotate(series, keep, left)
            for identity in gone if not self._together.leads else ():
                remove_links(drives, identity)
