"""Snapshots: the state after a step, kept while training goes on.

    handle = strata.snapshot(model, "runs/llama")      # behind optimizer.step(); returns at once
    handle.wait()                                      # "runs/llama/step-000500" is complete
    strata.load(model, "runs/llama")                   # goes on from the newest complete one

What rests on the SSD is not copied: its slots are held, and later writes go elsewhere
(engine/snapshots.hpp). A thread then waits for what is still to be written, makes it durable, links
the page files, and writes the manifest last (commit.py; several ranks: ranks.py). The format is
described in format.py.

Use from the thread that trains. The background thread knows the session and plain values only.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from ..._config.paths import AnyPath, as_path
from ..._config.threads import Pool
from ..._errors import StrataError
from ..._runtime.wrapped import Wrapped, wrapped
from ..rank_board import Board
from ..rank_calls import Call, Calls
from ..registrations import Contents
from ..together import Together
from .commit import Asked, Commit
from .context import Form, form_of, take_context
from .durability import Durability
from .kept import KeptSnapshots
from .ranks import RankCommit
from .series import check_series, recover, step_folder

NAME = "strata.snapshot()"
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
    model: nn.Module, path: AnyPath, *, keep: int = 2, extra: dict[str, Any] | None = None
) -> SnapshotHandle:
    """Keeps the state after the last optimizer.step() while training goes on: parameters and
    moments, and no gradients. Call it before the next backward(), never in the middle of an
    accumulation.

    It returns at once, whatever the model's size; the first call looks up which parameters and
    buffers there are, and with LockFree each one first waits until the updates that were released
    are over. What waits, if need be, is a later step(): until what it changes is kept. A snapshot
    that is asked for while another is being kept begins at that one's end, which a later step()
    waits for; nobody waits for files that are being written.

    Of several ranks each one calls it, with the same path and `keep`, behind the same step; each
    keeps what it owns, and rank 0 writes the one manifest when all have. It loads under any number
    of ranks. It has the random states and `extra` of each rank, and buffers of rank 0. Where a rank
    fails or dies, older snapshots are as they were.

    The page files of `ssd_path` are linked, so they outlive the run; where the file system has no
    links, pages are copied into the folder. The first snapshot sets room on the SSD aside: `keep` +
    1 times the state of what is trained, and once that of what is frozen, beside what rests there.

    Args:
        model: A wrapped model, after optimizer.step().
        path: The folder of the series. The snapshot becomes `path`/step-000500, with the number of
            the step; it counts from the moment that its manifest is there.
        keep: How many complete snapshots stay; older ones are removed once this one is complete.
        extra: JSON values, tuples and dense tensors, which strata.load() gives back. Keys of
            dictionaries may be strings, numbers, booleans and None.

    Returns:
        A handle: `wait()` returns when the snapshot is complete, `complete` tells whether it is.

    Raises:
        StrataError: Where the budget of the SSD has no such room, with what would do; where there
            is no SSD; what an earlier snapshot failed with (several ranks say that in the log); and
            from then on where pages could not be made durable.
        CheckpointError: `path` is a file, or the folder of a checkpoint. By the handle's wait():
            another rank has failed, or did not call, or gave another path or `keep`.
        TypeError: `keep` is no whole number, or `extra` holds what cannot be kept.
        RuntimeError: Between backward() and step(); where parameters are of two states, or the
            model has others than when it was wrapped, or other persistent buffers than at its first
            snapshot.
    """
    return _begin(model, as_path(path), keep, keep, extra)


def snapshot_alone(
    model: nn.Module, path: AnyPath, extra: dict[str, Any] | None = None
) -> SnapshotHandle:
    """As snapshot(), the only one of its series. Whoever asks removes it, on rank 0:
    remove_snapshot()."""
    return _begin(model, as_path(path), 1, 0, extra)


def _begin(
    model: nn.Module, path: Path, keep: int, beside: int, extra: dict[str, Any] | None
) -> SnapshotHandle:
    """`beside`: complete ones of the series, while another is taken."""
    state = wrapped(model)
    state.hooks.reset()
    state.landings.wait()  # ahead of a look at how far this rank has come
    taker = taker_of(state)
    with taker.calls.begin() as call:
        series = _check(state, path, keep, extra)
        taker.raise_failure()
        taker.durability.check()
        return taker.take(state, series, keep, beside, extra or {}, call)


def _check(state: Wrapped, path: Path, keep: int, extra: dict[str, Any] | None) -> Path:
    """The folder of the series. Raises where there can be no such snapshot now."""
    state.refuse_within_step("snapshot()")
    if not isinstance(keep, int) or isinstance(keep, bool):
        raise TypeError(f"keep must be a whole number, not {keep!r:.60}")
    if not 1 <= keep <= KEEP_MAX:
        raise ValueError(f"keep must be from 1 to {KEEP_MAX}, not {keep}")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    series = Path(os.path.realpath(path))
    check_series(series)
    return series


def taker_of(state: Wrapped) -> Taker:
    """The model's, made where it has none."""
    taker: Taker = state.snapshots or Taker(state)
    state.snapshots = taker
    return taker


class Taker:
    """Takes the snapshots of one wrapped model, one behind the other.

    What grows with the model is left to its thread, but for persistent buffers, which are copied by
    who asks, and a glance at what its modules have. Which parameters and buffers there are is
    looked up by the first call, and again when that has changed."""

    def __init__(self, state: Wrapped) -> None:
        """Of a process that is alone: removes what killed ones left on the drives."""
        self._session = state.session
        self._drives = [os.path.realpath(path) for path in state.config["ssd_paths"]]
        self.kept = KeptSnapshots(self._session)  # complete ones
        # The core counts from 1. All up to _known are, or were, known here; where a call was ended
        # in the middle, there may be another one.
        self._known, self._unsure = 0, False
        self._taking_over = False  # also where that was interrupted, and their numbers are lost
        # Killed processes have left something on the drives, or the last one, which failed.
        self._unclean = True
        self._handles: list[SnapshotHandle] = []  # not seen to be complete, the oldest first
        self.durability = Durability(self._drives)
        # Its thread ends what was begun before the interpreter goes.
        self._pool = Pool("strata-snapshot")
        state.before_close.append(self._pool.shutdown)
        self._drains = state.config["update"] == "lock_free"  # and the log is still to say so
        self._form = Form([], [])
        self._board = Board.of(state, "snapshots")
        self.calls = Calls(self._board, NAME)
        if self._board is None:
            self.tidy(Together.alone(NAME))

    def raise_failure(self) -> None:
        """Raises what one failed with, once. Several ranks log it: not all of them may know yet,
        and where one raised, the next snapshot of all would fail by that."""
        try:
            for handle in [h for h in self._handles if h.done]:
                self._handles.remove(handle)
                handle.raise_failure()
        except (RuntimeError, OSError) as error:
            if self._board is None:
                raise
            log.error("a snapshot has failed: %s", error)

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
        self,
        state: Wrapped,
        series: Path,
        keep: int,
        beside: int,
        extra: dict[str, Any],
        call: Call,
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
        state.gradients.drops.settle()
        context = take_context(state, state.contents, extra)
        folder = step_folder(series, context.manifest["step"])
        future: Future[None] = Future()
        handle = SnapshotHandle(folder, future)
        self.kept.drop_removed()
        complete = beside + self.kept.beside(series)
        if self._unsure:
            self._drop_lost()
        self._unsure = True
        if self._drains:
            log.info("LockFree: a snapshot first lets the updates that were released end")
            self._drains = False
        number = self._session.begin_snapshot(complete)
        self._known, self._unsure = number, False
        asked = Asked(number, folder, keep, context, self._form)
        try:
            self._handles.append(handle)
            call.post({"snapshots": folder.name, "folders": str(folder), "keep": keep})
            self._pool.submit(self._run, future, call, asked)
        except BaseException:  # the interpreter ends, or Ctrl-C
            if future.cancel():
                handle.forget()
                self._session.drop_snapshot(number)
            else:
                call.runs = True
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

    def _drop_lost(self) -> None:
        """Gives up those whose numbers an exception has lost. Those of an earlier run have numbers
        of their own."""
        begun = self._session.snapshots_begun()
        known = self.kept.numbers()
        for number in range(self._known + 1, begun + 1):
            if number not in known:
                self._session.drop_snapshot(number)

    def _run(self, future: Future[None], call: Call, asked: Asked) -> None:
        """On the thread, unless it was called off."""
        if not future.set_running_or_notify_cancel():
            return
        number, folder = asked.number, asked.folder
        try:
            call.hear()
            cleans, self._unclean = self._unclean, False
            with self.durability.watch(folder.parent):
                commit = Commit(self._session, self._drives, self.kept, self.durability, asked)
                if self._board is None:
                    commit.run(cleans)
                else:
                    RankCommit(commit, call.together).run(cleans)
        except BaseException as error:
            log.warning("the snapshot at %s has failed: %s", folder, error)
            self._unclean = True
            self.durability.note_failure(folder)
            if number not in self.kept.numbers():
                with contextlib.suppress(RuntimeError):  # the session may have ended
                    self._session.drop_snapshot(number)
            future.set_exception(error)
        else:
            future.set_result(None)

    def tidy(self, together: Together) -> None:
        """Removes what killed processes left on the drives, ahead of what looks at the links there.
        Of several ranks all do so, rank 0 first. REQUIRES: no snapshot is under way."""
        recover(self._drives, together, self._unclean)
        self._unclean = False
