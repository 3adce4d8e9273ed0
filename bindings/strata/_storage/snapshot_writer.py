"""Brings one snapshot to the disk: of one process, or of all ranks of a run, each of them a part.

    writer = Writer(session, drives, kept, durability, what)
    writer.write(together, cleans=False)         # waits; on a thread

Note [One commit]. Each rank holds the slots of what it owns, and links its own page files. A
snapshot is one manifest that names all of them.
    1. Rank 0 removes what killed processes left, and then the others do.
    2. Each rank has its state captured, and its pages on the disk.
    3. Rank 0 makes the new folder.
    4. Each rank links its page files, waits until the disk has the names, and says what lies where
       (snapshot_parts.py).
    5. When all have, rank 0 writes the manifest, and the folder takes its place.
Each phase ends for all ranks, or for none (together.py). Up to the end of phase 4 nobody has a
manifest, and so whoever fails takes its links away. From there on rank 0 alone decides: who does
not hear of it leaves its links as they are, and marked as pending. The next run on these drives
sees whether a manifest needs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointError,
    TensorWriter,
    replace_folder,
    tidy,
)
from .durability import Durability
from .large_manifest import write_large_manifest
from .replacing import make_newest
from .snapshot_context import Context, Form, write_state
from .snapshot_files import (
    RANKS_FORMAT,
    Links,
    clean_up,
    links_at,
    mark_pending,
    remove_links,
    snapshots_of,
)
from .snapshot_kept import KeptSnapshots
from .snapshot_pages import copy_pages, from_files, slots_of
from .snapshot_parts import join_part, note_steps, own_chunks, write_part
from .together import Together

if TYPE_CHECKING:
    from .._core import Session, TakenSnapshot

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
    ) -> None:
        """It knows the session and plain values only."""
        self._session, self._drives = session, drives
        self._kept, self._durability = kept, durability
        self._asked = asked
        self._links: Links | None = None
        self._decided = True  # this rank knows whether there is a manifest

    def write(self, together: Together, cleans: bool) -> None:
        """Returns when it is complete. See Note [One commit]."""
        asked, series = self._asked, self._asked.folder.parent
        with together.phase():
            self._durability.check()
            if together.leads:
                if cleans:
                    clean_up(self._drives)
                if self._kept.in_series(series) > asked.keep:
                    self._kept.rotate(series, asked.keep)  # that failed last time: slots are needed
        with together.phase() as phase:
            if not together.leads:
                if cleans:
                    clean_up(self._drives, clears=False)
                self._kept.drop_removed()
            pages = self._session.snapshot(asked.number)  # waits
            self._durability.sync_pages(self._session)
            phase.said = len(self._drives)
        try:
            self._commit(together, pages, phase.heard)
        except BaseException as error:
            self._give_up(knows=self._decided or isinstance(error, CheckpointError))
            raise
        if not together.leads:
            self._finish()
            self._kept.drop_removed()

    def _give_up(self, knows: bool) -> None:
        links = self._links
        if links is None:
            return
        if links.lead_to_what_is_there():
            links.leave()  # so its slots stay
            self._kept.add(links.id, self._asked.number, self._asked.folder, links.paths[0])
        elif knows:
            links.remove()
        else:
            links.leave()

    def _commit(self, together: Together, pages: TakenSnapshot, drives: list[int]) -> None:
        """`drives`: how many each rank has."""
        folder = self._asked.folder
        with contextlib.ExitStack() as stack:
            with together.phase() as phase:
                if together.leads:
                    self._links = Links(self._drives, folder)
                    tidy(folder)
                    replaced = links_at(folder)  # of another run that came by this step
                    if replaced is not None:
                        mark_pending(*replaced, folder)
                    new = stack.enter_context(replace_folder(folder))
                    phase.said = [self._links.id, str(new)]
            identity, place = phase.heard[0]
            with together.phase() as phase:
                first = sum(drives[: together.rank])
                phase.said = self._keep_pages(pages, identity, Path(place), first)
                if not together.leads:
                    write_part(Path(place), together.rank, pages, self._asked.context)
                    self._decided = False
            with together.phase():
                if together.leads:
                    entries = [entry for heard in phase.heard for entry in heard]
                    manifest = self._manifest(pages) | {"drives": entries}
                    if together.count > 1:
                        manifest |= {"snapshot": RANKS_FORMAT, "ranks": drives}
                    self._write_folder(new, manifest, together.count)
                    stack.close()
                    if replaced is not None:
                        remove_links(*replaced)
                    self._finish()
                    self._kept.rotate(folder.parent, self._asked.keep)
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
        manifest["scales"] = pages.scales or None
        if (gradients := pages.gradients) is not None:
            manifest["gradients"] = {"params": gradients, "groups": pages.hypers} | manifest["sums"]
        del manifest["sums"]
        note_steps(manifest, pages.param_steps)
        return manifest

    def _keep_pages(
        self, pages: TakenSnapshot, identity: str, new: Path, first: int
    ) -> list[dict[str, str]]:
        """Links this rank's page files, or copies its pages to the new folder. Returns the drives
        as the manifest has them. `first`: the number of the first one."""
        if self._links is None:
            self._links = Links(self._drives, self._asked.folder, identity)
        if self._session.link_pages(self._links.paths):
            self._links.sync()
            return self._links.drive_entries()
        log.warning(
            "the file systems of %s have no hard links: snapshots are copied to %s, page by page",
            ", ".join(self._drives),
            self._asked.folder.parent,
        )
        chunks = [chunk for _, chunk in own_chunks(pages)]
        slots, size = slots_of({"chunks": chunks, "scales": pages.scales}), pages.page_bytes
        files = self._session.page_files()
        try:
            names = copy_pages(from_files(files, size), len(files), slots, size, new, first)
        finally:
            for file in files:
                os.close(file)
        return [{"folder": "", "file": name} for name in names]

    def _write_folder(self, new: Path, manifest: dict[str, Any], ranks: int) -> None:
        """Of all ranks. The manifest comes last."""
        assert self._links is not None
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
            manifest["bytes"] = file.bytes
        write_large_manifest(new, manifest)
        others = [each / MANIFEST_NAME for each in snapshots_of(self._asked.folder.parent)]
        make_newest(new / MANIFEST_NAME, others)
