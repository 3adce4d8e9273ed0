"""Brings one snapshot to the disk by all ranks of a run: each takes the steps of commit.py.

    commit = RankCommit(Commit(...), together)
    commit.run(cleans=False)                     # waits; on a thread

Note [One commit]. Each rank holds the slots of what it owns, and links its own page files. A
snapshot is one manifest that names all of them.
    1. Rank 0 removes what killed processes left, and then the others do.
    2. Each rank has its state captured, and its pages on the disk.
    3. Rank 0 makes the new folder.
    4. Each rank links its page files, waits until the disk has the names, and says what lies where
       (parts.py).
    5. When all have, rank 0 writes the manifest to the new folder.
    6. Rank 0's folder takes its place.
    7. The other ranks note that their links stay. Then older snapshots are removed.
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
from ..replacing import writing
from ..together import Together
from .commit import Commit
from .parts import join_part, write_part
from .series import recover, taking_place

if TYPE_CHECKING:
    from ..._core import TakenSnapshot


class RankCommit:
    """Of one rank, and one snapshot."""

    def __init__(self, commit: Commit, together: Together) -> None:
        """`commit`: what this rank does of it."""
        self._commit, self._together = commit, together
        self._decided = True  # this rank knows whether there is a manifest

    def run(self, cleans: bool) -> None:
        """Returns when it is complete. See Note [One commit]."""
        commit = self._commit
        recover(commit.drives, self._together, cleans)
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
            # 4. The parts.
            with together.phase() as phase:
                place, first = self._place(Path(made)), sum(drives[: together.rank])
                commit.make_links(identity)
                phase.said = commit.keep_pages(pages, place, first)
                if not together.leads:
                    write_part(place, together.rank, pages, commit.asked.context)
            # 5. The manifest.
            with together.phase():
                if together.leads:
                    entries = [entry for said in phase.heard for entry in said]
                    manifest = commit.manifest(pages) | {"drives": entries}
                    commit.write_folder(new, manifest, partial(self._join, new, drives))
            # 6. It counts.
            self._decided = together.leads
            try:
                with together.phase():
                    if together.leads:
                        stack.close()
                        commit.finish()
            except CheckpointError:
                self._decided = True  # rank 0 has ended it, and the folder says how
                raise
        self._decided = True

    def _place(self, new: Path) -> Path:
        """Rank 0's new folder. Raises CheckpointError where this rank does not see it."""
        if not new.is_dir():
            raise CheckpointError(
                f"rank {self._together.rank} does not see {new.parent} as rank 0 does"
            )
        return new

    def _join(
        self, new: Path, drives: list[int], manifest: dict[str, Any], file: TensorWriter
    ) -> None:
        """What the other ranks have said in the new folder. `drives`: how many each rank has."""
        manifest["ranks"] = drives
        for chunk in manifest["chunks"]:
            if chunk is not None:
                chunk["rank"] = 0
        others = range(1, self._together.count)
        manifest["others"] = [join_part(new, rank, manifest, file) for rank in others]

    def _rotate(self, wanted: bool) -> None:
        """Removes older ones, if rank 0 wants it: the last time that may have failed."""
        with self._together.phase():
            self._commit.rotate(wanted and self._together.leads)
        if not self._together.leads:
            self._commit.kept.drop_removed()
