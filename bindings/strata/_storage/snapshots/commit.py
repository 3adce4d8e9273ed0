"""Brings one snapshot to the disk: all steps of a process that is alone, in their order. Several
ranks take the same steps, with phases around them: ranks.py.

    commit = Commit(session, drives, kept, durability, asked)
    commit.run(cleans=False)                     # waits; on a thread

Note [Complete or absent].
    1. What killed processes left on the drives is removed, and snapshots that are too many.
    2. The state is captured, and its pages are on the disk.
    3. Each drive notes whose links will be there, as pending; the new folder is made.
    4. The page files are linked, and the disk has the names.
    5. state.bin and then the manifest are written to the new folder.
    6. The folder takes its place: from here on the snapshot counts, and its links stay.
    7. Older snapshots are removed.
A failure up to the end of step 5 takes the links away. A killed process leaves them pending, and
the next one on these drives sees whether a manifest needs them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_files import STATE_NAME, TensorWriter, write_manifest
from ..replacing import writing
from ..together import Together
from .context import Context, Form, note_steps, own_chunks, write_state
from .durability import Durability
from .format import FORMAT
from .kept import KeptSnapshots
from .links import Links
from .pages import copy_pages, from_files, slots_of
from .series import make_newest_of, recover, taking_place

if TYPE_CHECKING:
    from ..._core import Session, TakenSnapshot

CALL = "strata.snapshot()"
Join = Callable[[dict[str, Any], TensorWriter], None]
"""Adds what other ranks have to a manifest, and to state.bin."""

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Asked:
    """A snapshot that was asked for."""

    number: int  # the core's
    folder: Path
    keep: int
    context: Context
    form: Form

    @property
    def series(self) -> Path:
        """The folder that its folder is in."""
        return self.folder.parent


class Commit:
    """The steps of one snapshot of one session, each a verb."""

    def __init__(
        self,
        session: Session,
        drives: list[str],
        kept: KeptSnapshots,
        durability: Durability,
        asked: Asked,
    ) -> None:
        """It knows the session and plain values only."""
        self.drives, self.kept, self.durability = drives, kept, durability
        self.asked = asked
        self._session = session
        self._links: Links | None = None

    def run(self, cleans: bool) -> None:
        """Returns when it is complete. See Note [Complete or absent]."""
        recover(self.drives, Together.alone(CALL), cleans)  # 1.
        self.rotate(self.are_too_many)
        pages = self.capture()  # 2.
        try:
            with writing(self.asked.folder):
                self.make_links()  # 3.
                with taking_place(self.asked.folder) as new:
                    entries = self.keep_pages(pages, new)  # 4.
                    self.write_folder(new, self.manifest(pages) | {"drives": entries})  # 5.
                self.finish()  # 6.
        except BaseException:
            self.give_up(decided=True)
            raise
        self.rotate(True)  # 7.

    @property
    def are_too_many(self) -> bool:
        """Whether older ones of the series have stayed: the last time their removal has failed."""
        return self.kept.in_series(self.asked.series) > self.asked.keep

    def rotate(self, wanted: bool) -> None:
        """Removes older ones, if that is wanted."""
        self.durability.check()
        if wanted:
            self.kept.rotate(self.asked.series, self.asked.keep)

    def capture(self) -> TakenSnapshot:
        """Waits until the state is in slots, and its pages are on the disk."""
        pages = self._session.snapshot(self.asked.number)
        self.durability.sync_pages(self._session)
        return pages

    def make_links(self, identity: str = "") -> Links:
        """Those of this snapshot, if they are still to be made. `identity`: see Links."""
        self._links = self._links or Links(self.drives, self.asked.folder, identity)
        return self._links

    def keep_pages(self, pages: TakenSnapshot, new: Path, first: int = 0) -> list[dict[str, str]]:
        """Links the page files, or copies the pages to the new folder. Returns the drives as the
        manifest has them. `first`: the number of the first one. REQUIRES: make_links()."""
        assert self._links is not None
        if self._session.link_pages(self._links.paths):
            self._links.sync()
            return self._links.drive_entries()
        log.warning(
            "the file systems of %s have no hard links: snapshots are copied to %s, page by page",
            ", ".join(self.drives),
            self.asked.series,
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

    def manifest(self, pages: TakenSnapshot) -> dict[str, Any]:
        """Of what this process has, with its steps; without drives."""
        context, form = self.asked.context, self.asked.form
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

    def write_folder(self, new: Path, manifest: dict[str, Any], join: Join | None = None) -> None:
        """The manifest comes last."""
        assert self._links is not None
        manifest["id"] = self._links.id
        with TensorWriter(new / STATE_NAME) as file:
            write_state(file, manifest, self.asked.context)
            if join is not None:
                join(manifest, file)
            manifest |= {"bytes": file.bytes, "snapshot": FORMAT}
        write_manifest(new, manifest)
        make_newest_of(self.asked.series, new)

    def finish(self) -> None:
        """The manifest is in its place."""
        assert self._links is not None
        self._links.finish()
        self.durability.note(self.asked.folder)
        self._hold()

    def give_up(self, decided: bool) -> None:
        """Something has failed. `decided`: what is in the folder now says whether it counts."""
        links = self._links
        if links is None:
            return
        if decided and not links.lead_to_what_is_there():
            links.remove()
        else:
            links.leave()  # so its slots stay
            self._hold()

    def _hold(self) -> None:
        assert self._links is not None
        self.kept.add(self._links.id, self.asked.number, self.asked.folder, self._links.paths[0])
