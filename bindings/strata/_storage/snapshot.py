"""Snapshots: the state behind a step, kept while training goes on.

    handle = strata.snapshot(model, "runs/llama")      # behind optimizer.step(); returns at once
    handle.wait()                                      # "runs/llama/step-000500" is complete
    strata.load(model, "runs/llama")                   # goes on from the newest complete one

What rests on the SSD is not copied: its slots are held, and later writes go elsewhere
(engine/snapshots.hpp). A thread then waits for what is still to be written, makes it durable, links
the page files, and writes the manifest last. The format is described in snapshot_files.py.

Use from the thread that trains. The background thread knows the session and plain values only.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from .._errors import StrataError
from .._runtime.wrapped import Wrapped, wrapped
from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    TensorWriter,
    replace_folder,
    tidy,
)
from .durability import Durability
from .held_state import Holder
from .large_manifest import give_way, write_large_manifest
from .registrations import Contents
from .replacing import make_newest
from .snapshot_context import Context, Form, form_of, take_context, write_state
from .snapshot_files import (
    Links,
    check_series,
    clean_up,
    links_at,
    mark_pending,
    remove_links,
    snapshots_of,
    step_folder,
)
from .snapshot_kept import KeptSnapshots
from .snapshot_pages import copy_pages, from_files, slots_of
from .together import refuse_snapshots

if TYPE_CHECKING:
    from .._core import TakenSnapshot

KEEP_MAX = 1 << 20

log = logging.getLogger("strata")


class SnapshotHandle:
    """A snapshot that is being taken."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        """strata.snapshot() makes it."""
        self.path = path
        self._future = future
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._future.done()

    @property
    def complete(self) -> bool:
        """Whether it is on the disk, whole."""
        return self._future.done() and self._future.exception() is None

    def wait(self, timeout: float | None = None) -> Path:
        """Returns the snapshot's folder when it is complete. Raises what it failed with, and
        TimeoutError after so many seconds."""
        try:
            self._future.result(timeout)
        except BaseException:
            self._told |= self._future.done()
            raise
        return self.path

    def forget(self) -> None:
        """Nothing came of it, and its caller knows."""
        self._told = True

    def raise_failure(self) -> None:
        """Raises what it failed with, unless somebody was told."""
        if self._future.done() and not self._told:
            self.wait()


def snapshot(
    model: nn.Module, path: str | Path, *, keep: int = 2, extra: dict[str, Any] | None = None
) -> SnapshotHandle:
    """Keeps the state of now while training goes on: parameters and moments behind the updates of
    the last optimizer.step(), and the gradients that have landed since, in the middle of an
    accumulation.

    It returns at once, whatever the model's size; the first call looks up which parameters and
    buffers there are. What waits, if need be, is a later step(): until
    what it changes is kept. A snapshot that is asked for while another is being kept begins at that
    one's end, which a later step() waits for; nobody waits for files that are being written.

    The page files of `ssd_path` are linked, so they outlive the run; where the file system has no
    links, pages are copied into the folder. The first snapshot sets room on the SSD aside: `keep` +
    1 times the state of what is trained (and of its gradients, where there are any), and once that
    of what is frozen, beside what rests there.

    Args:
        model: A wrapped model, behind optimizer.step().
        path: The folder of the series. The snapshot becomes `path`/step-000500, with the number of
            the step; it counts from the moment that its manifest is there.
        keep: How many complete snapshots stay; older ones are removed once this one is complete.
        extra: JSON values, tuples and dense tensors, which strata.load() gives back. Keys of
            dictionaries may be strings, numbers, booleans and None.

    Returns:
        A handle: `wait()` returns when the snapshot is complete, `complete` tells whether it is.

    Raises:
        StrataError: Where the budget of the SSD has no such room, with what would do; where there
            is no SSD; between a backward and step() with update="in_backward", where some
            parameters are updated and others are not; what an earlier snapshot failed with; and
            from then on where pages could not be made durable.
        CheckpointError: `path` is a file, or the folder of a checkpoint.
        TypeError: `keep` is no whole number, or `extra` holds what cannot be kept.
        ValueError: Several ranks train the model: strata.save() writes what they have.
        RuntimeError: Where parameters are of two states, or the model has others than when it was
            wrapped, or other persistent buffers than at its first snapshot.
    """
    return _begin(model, Path(path), keep, keep, extra)


def snapshot_alone(
    model: nn.Module, path: str | Path, extra: dict[str, Any] | None = None
) -> SnapshotHandle:
    """As snapshot(), the only one of its series. Whoever asks removes it: remove_snapshot()."""
    return _begin(model, Path(path), 1, 0, extra)


def _begin(
    model: nn.Module, path: Path, keep: int, beside: int, extra: dict[str, Any] | None
) -> SnapshotHandle:
    """`beside`: complete ones of the series, while another is taken."""
    state = wrapped(model)
    state.hooks.reset()
    state.refuse_half_step("snapshot()")
    state.landings.wait()
    if not isinstance(keep, int) or isinstance(keep, bool):
        raise TypeError(f"keep must be a whole number, not {keep!r:.60}")
    if not 1 <= keep <= KEEP_MAX:
        raise ValueError(f"keep must be from 1 to {KEEP_MAX}, not {keep}")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    series = Path(os.path.realpath(path))
    check_series(series)
    taker = state.snapshots or Taker(state)
    state.snapshots = taker
    taker.raise_failure()
    taker.durability.check()
    return taker.take(state, series, keep, beside, extra or {})


class Taker:
    """Takes the snapshots of one wrapped model, one behind the other.

    What grows with the model is left to its thread, but for persistent buffers, which are copied by
    who asks, and a glance at what its modules have. Which parameters and buffers there are is
    looked up by the first call, and again when that has changed."""

    def __init__(self, state: Wrapped) -> None:
        """Removes what killed processes left on the drives. Raises ValueError for several ranks."""
        refuse_snapshots(state)
        self._session = state.session
        self._drives = [os.path.realpath(path) for path in state.config["ssd_paths"]]
        self.kept = KeptSnapshots(self._session)  # complete ones
        # The core counts from 1. All up to _known are, or were, known here; where a call was ended
        # in the middle, there may be another one.
        self._known, self._unsure = 0, False
        self._taking_over = False  # also where that was interrupted, and their numbers are lost
        self._failed = False  # the last one did, and may have left something
        self._handles: list[SnapshotHandle] = []  # not seen to be complete, the oldest first
        self.durability = Durability(self._drives)
        self.holder = Holder(self._session, self._drives, self.durability)
        # Its thread ends what was begun before the interpreter goes.
        self._pool = ThreadPoolExecutor(1, "strata-snapshot")
        state.before_close += [self._pool.shutdown, self.holder.shutdown]
        self._form = Form([], [])
        clean_up(self._drives)

    def raise_failure(self) -> None:
        """Raises what one failed with, once."""
        self.holder.raise_failure()
        for handle in [h for h in self._handles if h.done]:
            self._handles.remove(handle)
            handle.raise_failure()

    def finish(self) -> None:
        """Waits for all of them. Raises nothing: what is not complete is not there."""
        for handle in list(self._handles):
            with contextlib.suppress(Exception):
                handle.wait()

    def take_over(
        self, snapshots: Sequence[tuple[str, Path, str]], resume: Callable[[], list[int]]
    ) -> None:
        """Snapshots of an earlier run in the files that `resume` makes the session's: each one's
        id, folder and first link, in the order of the numbers that it returns. Raises StrataError,
        and has changed nothing."""
        self._taking_over = True
        try:
            numbers = resume()
        except StrataError:
            self._taking_over = False
            raise
        for (identity, folder, link), number in zip(snapshots, numbers, strict=True):
            self.kept.add(identity, number, folder, link)
        self.durability.note(snapshots[0][1])  # it was whole when it was looked up
        self._taking_over = False

    def take(
        self, state: Wrapped, series: Path, keep: int, beside: int, extra: dict[str, Any]
    ) -> SnapshotHandle:
        """Begins one. `beside`: complete ones of the series meanwhile. An exception of a signal
        handler may end it anywhere: what was begun is then completed, or given up by the next."""
        if self._taking_over:
            raise StrataError(
                "a strata.load() was interrupted while it took the pages of snapshots over, so "
                "this run cannot tell which of them are held: wrap the model anew, and load"
            )
        if state.contents is None or not state.contents.unchanged():
            self._look(state)
        context = take_context(state, state.contents.buffers, extra)
        folder = step_folder(series, context.manifest["step"])
        future: Future[None] = Future()
        handle = SnapshotHandle(folder, future)
        self.kept.drop_removed()
        complete = beside + self.kept.beside(series)
        if self._unsure:
            self._drop_lost(complete)
        self._unsure = True
        number = self.holder.begin(complete)
        self._known, self._unsure = number, False
        try:
            self._handles.append(handle)
            self._pool.submit(self._run, future, number, folder, keep, context, self._form)
        except BaseException:  # the interpreter ends, or Ctrl-C
            if future.cancel():
                handle.forget()
                self._session.drop_snapshot(number)
            raise
        return handle

    def _look(self, state: Wrapped) -> None:
        """Some module has other parameters, buffers or modules than before. Raises RuntimeError
        where that makes another model, with the name of what has changed."""
        state.check_parameters()
        contents = Contents(state.model)
        if state.contents is not None:
            contents.check_buffers(state.contents)
        self._form = form_of(state)
        state.contents = contents

    def _drop_lost(self, complete: int) -> None:
        """Gives up those whose numbers an exception has lost. The holder knows its own, and those
        of an earlier run have numbers of their own."""
        begun = self._session.begin_snapshot(complete)
        known = self.kept.numbers() | {self.holder.number}
        for number in range(self._known + 1, begun + 1):
            if number not in known:
                self._session.drop_snapshot(number)

    def _run(self, future: Future[None], number: int, folder: Path, *what: Any) -> None:
        """On the thread, unless it was called off."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            self.durability.check()
            with self.durability.watch(folder.parent):
                if self._failed:
                    clean_up(self._drives)
                self._failed = False
                self._write(number, folder, *what)
        except BaseException as error:
            self._failed = True
            self.durability.note_failure(folder)
            if number not in self.kept.numbers():
                with contextlib.suppress(RuntimeError):  # the session may have ended
                    self._session.drop_snapshot(number)
            future.set_exception(error)
        else:
            future.set_result(None)

    def make_room_to_hold(self) -> None:
        """Room for what self.holder is to hold. Raises StrataError where there can be none."""
        self.finish()
        self.kept.drop_removed()
        self.holder.make_room(len(self.kept))

    def _write(self, number: int, folder: Path, keep: int, context: Context, form: Form) -> None:
        """On the thread."""
        if self.kept.in_series(folder.parent) > keep:
            self.kept.rotate(folder.parent, keep)  # that failed last time: slots are needed
        pages = self._session.snapshot(number)  # waits
        self.durability.sync_pages(self._session)
        links = Links(self._drives, folder)
        try:
            self._write_folder(folder, links, pages, form, context)
            links.finish()
        except BaseException:
            if links.lead_to_what_is_there():
                links.leave()  # so its slots stay
                self.kept.add(links.id, number, folder, links.paths[0])
            else:
                links.remove()
            raise
        self.durability.note(folder)
        self.kept.add(links.id, number, folder, links.paths[0])
        self.kept.rotate(folder.parent, keep)

    def _write_folder(
        self, folder: Path, links: Links, pages: TakenSnapshot, form: Form, context: Context
    ) -> None:
        manifest = context.manifest | {"id": links.id, "page_bytes": pages.page_bytes}
        manifest["params"] = [dict(entry) for entry in form.params]
        manifest["parts"] = form.parts
        manifest["chunks"] = []
        for i in range(pages.chunk_count):
            manifest["chunks"].append(pages.chunk(i))
            give_way()
        manifest["scales"] = pages.scales or None
        if (gradients := pages.gradients) is not None:
            manifest["gradients"] = {"params": gradients, "groups": pages.hypers} | manifest["sums"]
        del manifest["sums"]
        for place, step in enumerate(pages.param_steps):
            entry = manifest["params"][manifest["parts"][place][0]]
            entry["step"] = max(entry["step"], step)
        tidy(folder)
        replaced = links_at(folder)  # of another run that came by this step
        if replaced is not None:
            mark_pending(*replaced, folder)
        linked = self._session.link_pages(links.paths)
        if linked:
            links.sync()
        with replace_folder(folder) as new:
            manifest["drives"] = links.drive_entries() if linked else self._copy(manifest, new)
            with TensorWriter(new / STATE_NAME) as file:
                write_state(file, manifest, context)
                manifest["bytes"] = file.bytes
            write_large_manifest(new, manifest)
            others = [each / MANIFEST_NAME for each in snapshots_of(folder.parent)]
            make_newest(new / MANIFEST_NAME, others)
        if replaced is not None:
            remove_links(*replaced)

    def _copy(self, manifest: dict[str, Any], folder: Path) -> list[dict[str, str]]:
        log.warning(
            "the file systems of %s have no hard links: snapshots are copied to %s, page by page",
            ", ".join(self._drives),
            folder.parent.parent,
        )
        files = self._session.page_files()
        try:
            size = manifest["page_bytes"]
            read = from_files(files, size)
            names = copy_pages(read, len(files), slots_of(manifest), size, folder)
        finally:
            for file in files:
                os.close(file)
        return [{"folder": "", "file": name} for name in names]
