"""Going on from a snapshot where it lies: its page files become the session's own, and each page is
read, and verified, when it is first used.

    why = adopt(state, manifest, folder, scales, together)   # "": done; else nothing has changed

That is possible on the file system of the snapshot, with the same pages: their size, what lies in
them, and the form of moments. Scales of moments are read now. What other snapshots have in the same
files stays as it is: all of them are found by their links, or the files are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..._core import PageFiles
from ..._errors import StrataError
from ..._runtime.wrapped import Wrapped
from ..checkpoint_files import CheckpointError
from ..stored import stored_tensors
from ..together import Together
from .capture import taker_of
from .context import parts_of, rule_of
from .format import LINKS, ROLES, drives_by_rank, read_snapshot
from .links import link_owner
from .pages import Slot, slots_of

Chunk = dict[str, Any]
Scales = Callable[[Chunk, int, int], torch.Tensor]
"""Those of a chunk's first elements, by moment and number of elements."""


class _RefusedError(Exception):
    """The snapshot has to be read; the message says why."""


def adopt(
    state: Wrapped, manifest: dict[str, Any], folder: Path, scales: Scales, together: Together
) -> str:
    """Makes the snapshot's pages the session's, without reading them; of several ranks those that
    this one owns. Returns why that is not possible; then nothing has changed. REQUIRES: the
    manifest fits the model; no half step."""
    folder = Path(os.path.realpath(folder))  # as links and snapshots are told of
    ranks = len(drives_by_rank(manifest))
    if ranks != together.count:
        return f"its pages are shared out over {ranks}, and there are {together.count}"
    try:
        if not _go_back(state, manifest, scales):
            _compare(state, manifest, together.rank)
            _take_files(state, manifest, folder, scales, together.rank)
    except (_RefusedError, StrataError, OSError) as error:
        return str(error)
    return ""


def _go_back(state: Wrapped, manifest: dict[str, Any], scales: Scales) -> bool:
    """To a snapshot that this run took, or went on from. False: it holds the slots of none."""
    if state.snapshots is None:
        return False
    state.snapshots.finish()
    number = state.snapshots.kept.number_of(manifest["id"])
    if number is None:
        return False
    held = state.session.snapshot(number)
    mine = [i for i in range(held.chunk_count) if held.mine(i)]
    chunks = dict(enumerate(manifest["chunks"]))
    if any(i not in chunks or _slots(held.chunk(i)) != _slots(chunks[i]) for i in mine):
        return False  # somebody has changed the manifest
    state.session.go_back(number, _scale_area(state, manifest, scales))
    return True


def _compare(state: Wrapped, manifest: dict[str, Any], rank: int) -> None:
    """Raises _RefusedError where pages are others than the session's."""
    ours = state.session.page_layout()
    if ours.page_bytes != manifest["page_bytes"]:
        raise _RefusedError("its pages have another size")
    if state.config["moment_dtype"] != manifest["moment_dtype"]:
        raise _RefusedError("its moments have another form")
    for tensor, entry in zip(stored_tensors(state.model), manifest["params"], strict=True):
        if entry["trainable"] and entry["rule"] != rule_of(state, tensor):
            raise _RefusedError(f"the moments of {entry['name']} are of another optimizer")
    forms = [_form(ours.chunk(i)) for i in range(ours.chunk_count)]
    same = forms == [_form(chunk) for chunk in manifest["chunks"]]
    if not same or manifest["parts"] != parts_of(state):
        raise _RefusedError("its pages hold other elements")
    for i, chunk in enumerate(manifest["chunks"]):
        if ours.mine(i) != (chunk.get("rank", 0) == rank):
            raise _RefusedError("its ranks own other pages")


def _form(chunk: Chunk) -> list[Any]:
    """What lies where in a chunk."""
    runs: list[list[int]] = []
    for part, first, count, at, *_ in chunk["runs"]:
        if runs and runs[-1][0] == part and runs[-1][3] + runs[-1][2] == at:
            runs[-1][2] += count  # of another step
        else:
            runs.append([part, first, count, at])
    form: list[Any] = [runs]
    for role in ROLES:
        per_page, begin, found = chunk[role] or (0, 0, [])
        form.append([per_page, begin, len(found)])
    return form


def _slots(chunk: Chunk) -> list[Any]:
    """Which slots the pages of its state have, and what these hold."""
    return [[page and list(page) for page in (chunk[role] or ((), (), ()))[2]] for role in ROLES]


def _scale_area(state: Wrapped, manifest: dict[str, Any], scales: Scales) -> bytes:
    """The scales of moments as they lie in the session."""
    ours = state.session.page_layout()
    area = torch.zeros(ours.scale_bytes, dtype=torch.uint8)
    for number, chunk in enumerate(manifest["chunks"] if ours.scale_bytes else []):
        if not ours.mine(number):
            continue
        places = ours.scale_places(number)
        if len(places) != len(chunk["scales"]):
            raise _RefusedError("it has scales of other moments")
        elements = max(run[3] + run[2] for run in chunk["runs"])
        for moment, to in enumerate(places):
            found = scales(chunk, moment, elements)
            area[to : to + found.numel()] = found
    return area.numpy().tobytes()


def _take_files(
    state: Wrapped, manifest: dict[str, Any], folder: Path, scales: Scales, rank: int
) -> None:
    """Raises _RefusedError, StrataError, and has changed nothing."""
    drives = [os.path.realpath(path) for path in state.config["ssd_paths"]]
    entries = drives_by_rank(manifest)[rank]
    if not all(drive["folder"] for drive in entries):
        raise _RefusedError("its pages are copies")
    paths = [os.path.join(drive["folder"], drive["file"]) for drive in entries]
    if len(paths) != len(drives):
        raise _RefusedError(f"it lies on {len(paths)} drives, and ssd_path= names {len(drives)}")
    for path, drive in zip(paths, drives, strict=True):
        if os.stat(path).st_dev != os.stat(drive).st_dev:
            raise _RefusedError(f"{path} is on another file system than {drive}")
    files = PageFiles(drives, paths)  # nobody else writes to them, or links them, from here on
    taker = taker_of(state)  # which removes what killed processes left
    places = {*drives, *(os.path.realpath(drive["folder"]) for drive in entries)}
    holders = _holders(files, manifest, sorted(places))
    if manifest["id"] not in holders or holders[manifest["id"]].folder != folder:
        raise _RefusedError("its links belong to another folder")
    slots = [
        page[0] if page and chunk.get("rank", 0) == rank else None
        for chunk in manifest["chunks"]
        for role in ROLES
        for page in (chunk[role] or ((), (), ()))[2]
    ]
    first = [manifest["id"], *(holders.keys() - {manifest["id"]})]
    held = [holders[each].slots for each in first]
    area = _scale_area(state, manifest, scales)
    taker.take_over(
        [(each, holders[each].folder, holders[each].link) for each in first],
        lambda: state.session.resume(files, held, slots, area),
    )


@dataclass(frozen=True)
class _Holder:
    """A snapshot that has links to the files."""

    folder: Path
    link: str  # to the first of them
    slots: list[Slot]


def _holders(files: PageFiles, manifest: dict[str, Any], places: list[str]) -> dict[str, _Holder]:
    """Every snapshot that links these files, by its id. Raises _RefusedError where a file has a
    name of which that cannot be said."""
    found = []
    for i, (device, inode, names) in enumerate(files.identities()):
        links = _links_of(i, (device, inode), places)
        if len(links) != names:
            raise _RefusedError(f"a page file has {names} names, {len(links)} of snapshots")
        found.append(links)
    if any(links.keys() != found[0].keys() for links in found):
        raise _RefusedError("another snapshot has a part of its page files only")
    holders = {}
    for identity, place in found[0].items():
        owner = link_owner(Path(place), identity)
        if owner is None:
            raise _RefusedError(f"nobody knows whose links {identity} are")
        link = f"{place}/{LINKS}/{identity}-0.pages"
        holders[identity] = _Holder(owner, link, _held_by(owner, identity, place, manifest))
    return holders


def _links_of(number: int, file: tuple[int, int], places: list[str]) -> dict[str, str]:
    """The ids of the snapshots that link a file, by that number among theirs, and where."""
    links = {}
    for place in places:
        folder = Path(place) / LINKS
        for entry in os.scandir(folder) if folder.is_dir() else []:
            status = entry.stat(follow_symlinks=False)
            identity, _, end = entry.name.partition("-")
            if (status.st_dev, status.st_ino) == file and end == f"{number}.pages":
                links[identity] = place
    return links


def _held_by(owner: Path, identity: str, place: str, manifest: dict[str, Any]) -> list[Slot]:
    """What a snapshot has in the slots of the file whose link is there. Raises _RefusedError where
    that cannot be said."""
    try:
        other = manifest if identity == manifest["id"] else read_snapshot(owner)
        same = other["id"] == identity and other["page_bytes"] == manifest["page_bytes"]
        rank = _rank_at(other, place)
        slots = slots_of(other, rank)
    except (CheckpointError, ValueError) as error:
        raise _RefusedError(
            f"another snapshot in its page files cannot be read: {error}"
        ) from error
    if not same:
        raise _RefusedError(f"{owner} is another snapshot than the one that has the links")
    return slots


def _rank_at(manifest: dict[str, Any], place: str) -> int:
    """Whose drive it is. Raises ValueError where it is none of the snapshot's."""
    for rank, drives in enumerate(drives_by_rank(manifest)):
        if place in (os.path.realpath(drive["folder"]) for drive in drives):
            return rank
    raise ValueError(place)
