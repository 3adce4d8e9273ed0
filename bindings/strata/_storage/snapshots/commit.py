"""Brings one snapshot to the disk: of one process, or of all ranks of a run, each of them a part.

    writer = Writer(session, drives, kept, durability, what, together, board)
    writer.write(cleans=False)                   # waits; on a thread

Note [One commit]. Each rank holds the slots of what it owns, and links its own page files. A
snapshot is one manifest that names all of them.
    1. Rank 0 removes what killed processes left, and then the others do.
    2. Each rank has its state captured, and its pages on the disk.
    3. Rank 0 makes the new folder.
    4. Each rank links its page files, waits until the disk has the names, and says what lies where
       (ranks.py).
    5. When all have, rank 0 writes the manifest to the new folder. Machines that do not see it get
       a copy of their own (machines.py).
    6. Rank 0's folder takes its place.
    7. So do the copies.
    8. The other ranks note that their links stay. Then older snapshots are removed, on all
       machines.
Each phase ends for all ranks, or for none (../together.py). Up to the end of phase 5 there is no
manifest in its place, and so whoever fails takes its links away. From there on rank 0 alone
decides: who does not hear of it leaves its links as they are, and marked as pending. The next run
on these drives sees whether a manifest needs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_files import STATE_NAME, CheckpointError, TensorWriter, write_manifest
from ..rank_board import Board
from ..replacing import writing
from ..together import Together
from .context import Context, Form, write_state
from .durability import Durability
from .format import FORMAT, id_at
from .kept import KeptSnapshots
from .links import Links, mark_going, remove_links
from .machines import Copies, make_newest_of, recover
from .pages import copy_pages, from_files, slots_of
from .ranks import join_part, note_steps, own_chunks, write_part
from .series import snapshots_of, taking_place

if TYPE_CHECKING:
    from ..._core import Session, TakenSnapshot

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Asked:
    """A snapshot that was asked for."""

    number: int  # the core's
    folder: Path
    keep: int
    context: Context
    form: Form


class Writer:
    """Of one session, and one snapshot."""

    def __init__(
        self,
        session: Session,
        drives: list[str],
        kept: KeptSnapshots,
        durability: Durability,
        asked: Asked,
        together: Together,
        board: Board | None,
    ) -> None:
        """It knows the session and plain values only. `board`: of several ranks."""
        self._session, self._drives = session, drives
        self._kept, self._durability = kept, durability
        self._asked = asked
        self._together, self._board = together, board
        self._links: Links | None = None
        self._decided = True  # this rank knows whether there is a manifest

    def write(self, cleans: bool) -> None:
        """Returns when it is complete. See Note [One commit]."""
        asked = self._asked
        recover(self._board, self._drives, self._together, cleans)
        self._rotate(self._kept.in_series(asked.folder.parent) > asked.keep)
        with self._together.phase() as phase:
            pages = self._session.snapshot(asked.number)  # waits
            self._durability.sync_pages(self._session)
            phase.said = len(self._drives)
        try:
            self._commit(pages, phase.heard)
            with self._together.phase():
                if not self._together.leads:
                    self._finish()
        except BaseException:
            self._give_up()
            raise
        self._rotate(True)
        if self._board is not None:
            self._board.forget_sent()

    def _rotate(self, wanted: bool) -> None:
        """Removes older ones, if rank 0 wants it: the last time that may have failed. So does any
        other machine: one where that was cut short, or that others have gone on without, has more
        than rank 0's."""
        series, keep, kept = self._asked.folder.parent, self._asked.keep, self._kept
        together = self._together
        with together.phase() as phase:
            self._durability.check()
            if together.machines:
                olds = kept.outdated(series, keep) if together.leads else []
                phase.said = {"wanted": wanted, "outdated": [id_at(each) for each in olds]}
            elif together.leads and wanted:
                kept.rotate(series, keep)
        if together.machines:
            wanted = any(said["wanted"] for said in phase.heard)
            outdated = phase.heard[0]["outdated"] if wanted else []
            self._rotate_machines([identity for identity in outdated if identity], wanted)
        if not together.leads:
            kept.drop_removed()

    def _rotate_machines(self, going: list[str], wanted: bool) -> None:
        """Who is killed from here on leaves links that the next run removes; also of what others
        have removed on rank 0's machine meanwhile."""
        series, keep, kept = self._asked.folder.parent, self._asked.keep, self._kept
        with self._together.phase():
            if not self._together.leads:
                mark_going(self._drives, going)
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
                remove_links(self._drives, identity)

    def _give_up(self) -> None:
        links = self._links
        if links is None:
            return
        if self._decided and not links.lead_to_what_is_there():
            links.remove()
        else:
            links.leave()  # so its slots stay
            self._kept.add(links.id, self._asked.number, self._asked.folder, links.paths[0])

    def _commit(self, pages: TakenSnapshot, drives: list[int]) -> None:
        """`drives`: how many each rank has."""
        folder, together = self._asked.folder, self._together
        with writing(folder), contextlib.ExitStack() as stack:
            # 3. The new folder.
            with together.phase() as phase:
                if together.leads:
                    links = self._make_links()
                    new = stack.enter_context(taking_place(folder))
                    phase.said = [links.id, str(new)]
            identity, made = phase.heard[0]
            copies = Copies(identity, made, together, self._board)
            # 4. The parts.
            make_links = partial(self._make_links, identity)
            with copies.meeting(folder, make_links), together.phase() as phase:
                place, first = copies.place(), sum(drives[: together.rank])
                entries = self._keep_pages(pages, make_links(), place, first)
                if not together.leads:
                    write_part(place, together.rank, pages, self._asked.context)
                    copies.send_part()
                phase.said = {"drives": entries, "of": copies.of}
            copies.hear([said["of"] for said in phase.heard])
            # 5. The manifest, and its copies.
            with together.phase():
                if together.leads:
                    copies.take_parts(new)
                    entries = [entry for said in phase.heard for entry in said["drives"]]
                    self._write_folder(new, self._manifest(pages) | {"drives": entries}, drives)
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
                        self._finish()
            except CheckpointError:
                self._decided |= copies.of == 0  # rank 0 has ended it, and the folder says how
                raise
            # 7. So it does on all machines.
            if copies.needed:
                with together.phase():
                    stack.close()
        self._decided = True

    def _finish(self) -> None:
        """The manifest is there."""
        assert self._links is not None
        self._links.finish()
        self._durability.note(self._asked.folder)
        self._kept.add(self._links.id, self._asked.number, self._asked.folder, self._links.paths[0])

    def _manifest(self, pages: TakenSnapshot) -> dict[str, Any]:
        """Of what this rank has, with its steps; without drives."""
        context, form = self._asked.context, self._asked.form
        manifest = context.manifest | {"page_bytes": pages.page_bytes}
        manifest["params"] = [dict(entry) for entry in form.params]
        manifest["parts"] = form.parts
        manifest["chunks"] = [None] * pages.chunk_count
        for number, chunk in own_chunks(pages):
            manifest["chunks"][number] = chunk
        note_steps(manifest, pages.param_steps)
        for entry in manifest["params"]:
            entry["step"] = context.empty_steps.get(entry["name"], entry["step"])
        return manifest

    def _make_links(self, identity: str = "") -> Links:
        """Those of this snapshot, if they are still to be made."""
        self._links = self._links or Links(self._drives, self._asked.folder, identity)
        return self._links

    def _keep_pages(
        self, pages: TakenSnapshot, links: Links, new: Path, first: int
    ) -> list[dict[str, str]]:
        """Links this rank's page files, or copies its pages to the new folder. Returns the drives
        as the manifest has them. `first`: the number of the first one."""
        if self._session.link_pages(links.paths):
            links.sync()
            return links.drive_entries()
        if self._together.machines:
            raise CheckpointError(
                f"the file systems of {', '.join(self._drives)} have no hard links, which "
                "snapshots of several machines need: use strata.save()"
            )
        log.warning(
            "the file systems of %s have no hard links: snapshots are copied to %s, page by page",
            ", ".join(self._drives),
            self._asked.folder.parent,
        )
        chunks = [chunk for _, chunk in own_chunks(pages)]
        size = pages.page_bytes
        slots = slots_of({"chunks": chunks, "page_bytes": size})
        files = self._session.page_files()
        try:
            names = copy_pages(from_files(files, size), len(files), slots, size, new, first)
        finally:
            for file in files:
                os.close(file)
        return [{"folder": "", "file": name} for name in names]

    def _write_folder(self, new: Path, manifest: dict[str, Any], drives: list[int]) -> None:
        """Of all ranks. The manifest comes last. `drives`: how many each rank has."""
        assert self._links is not None
        ranks, machines = self._together.count, list(self._together.machines)
        if ranks > 1:
            manifest["ranks"] = drives
        if machines:
            manifest |= {"machines": machines, "copies": []}
        manifest["id"] = self._links.id
        with TensorWriter(new / STATE_NAME) as file:
            write_state(file, manifest, self._asked.context)
            if ranks > 1:
                for chunk in manifest["chunks"]:
                    if chunk is not None:
                        chunk["rank"] = 0
                manifest["others"] = [
                    join_part(new, rank, manifest, file) for rank in range(1, ranks)
                ]
            manifest |= {"bytes": file.bytes, "snapshot": FORMAT}
        write_manifest(new, manifest)
        make_newest_of(self._asked.folder.parent, new)
