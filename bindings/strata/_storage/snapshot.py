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
import json
import logging
import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._optim.groups import moments_of
from .._runtime.wrapped import Wrapped, wrapped
from . import rng
from .checkpoint import check_buffers, dtype_name, model_layout, plain_groups, raw_bytes
from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    Record,
    TensorWriter,
    replace_folder,
    tidy,
    write_manifest,
)
from .held_state import Holder
from .snapshot_files import (
    FORMAT,
    Links,
    clean_up,
    copy_pages,
    finish_removals,
    links_at,
    mark_pending,
    remove_links,
    remove_snapshot,
    slots_of,
    snapshots_of,
    step_folder,
)
from .snapshot_form import TENSOR_KEY
from .stored import StoredTensor, persistent_buffers, stored_tensors

log = logging.getLogger("strata")


class SnapshotHandle:
    """A snapshot that is being taken."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        """strata.snapshot() makes it."""
        self.path = path
        self._future = future
        self._told = False

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
    """Keeps the state behind the last optimizer.step() while training goes on.

    The page files of `ssd_path` are linked, so they outlive the run; where the file system has no
    links, pages are copied into the folder. The first call sets room on the SSD aside, and may take
    longer: `keep` + 1 times the state of what is trained, and once that of what is frozen, beside
    what rests there.

    Args:
        model: A wrapped model, behind optimizer.step().
        path: The folder of the series. The snapshot becomes `path`/step-000500, with the number of
            the step; it counts from the moment that its manifest is there.
        keep: How many complete snapshots stay; older ones are removed once this one is complete.
        extra: JSON values and tensors, which strata.load() gives back.

    Returns:
        A handle: `wait()` returns when the snapshot is complete, `complete` tells whether it is.

    Raises:
        StrataError: Where the budget of the SSD has no such room, with what would do; where there
            is no SSD; in the middle of an accumulation; and what the last snapshot failed with.
        RuntimeError: Where parameters are of two states.
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
    state.check_parameters()
    state.hooks.reset()
    state.refuse_half_step("snapshot()")
    state.landings.wait()
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    taker = state.snapshots or Taker(state)
    state.snapshots = taker
    taker.raise_failure()
    return taker.take(state, Path(os.path.realpath(path)), keep, beside, extra or {})


@dataclass
class _Context:
    """What is in no page, as it was when the snapshot was asked for."""

    manifest: dict[str, Any]
    buffers: list[torch.Tensor]
    tensors: list[torch.Tensor]


class Taker:
    """Takes the snapshots of one wrapped model, one behind the other."""

    def __init__(self, state: Wrapped) -> None:
        """Removes what killed processes left on the drives."""
        self._session = state.session
        self._drives = [os.path.realpath(path) for path in state.config["ssd_paths"]]
        self._ids: dict[Path, int] = {}  # the core's, of those that are complete or on their way
        # The core counts from 1. All up to _known are, or were, known here; where a call was ended
        # in the middle, there may be another one.
        self._known, self._unsure = 0, False
        self._failed = False  # the last one did, and may have left something
        self._last: SnapshotHandle | None = None
        self.holder = Holder(self._session, self._drives)
        # Its thread ends what was begun before the interpreter goes.
        self._pool = ThreadPoolExecutor(1, "strata-snapshot")
        clean_up(self._drives)

    def raise_failure(self) -> None:
        """Raises what the last one failed with, once."""
        self.holder.raise_failure()
        if self._last is not None:
            self._last.raise_failure()

    def finish(self) -> None:
        """Waits for the last one. Raises nothing: what is not complete is not there."""
        if self._last is not None:
            with contextlib.suppress(Exception):
                self._last.wait()

    def number_of(self, folder: Path) -> int | None:
        """The core's, of a snapshot that is complete; None: it has none of that folder."""
        return self._ids.get(folder)

    def take_over(self, numbers: dict[Path, int]) -> None:
        """Snapshots of an earlier run in the session's files: their slots go with them."""
        self._ids |= numbers

    def take(
        self, state: Wrapped, series: Path, keep: int, beside: int, extra: dict[str, Any]
    ) -> SnapshotHandle:
        """Begins one. `beside`: complete ones of the series meanwhile. An exception of a signal
        handler may end it anywhere: what was begun is then completed, or given up by the next."""
        context = _context(state, extra)
        folder = step_folder(series, context.manifest["step"])
        future: Future[None] = Future()
        handle = SnapshotHandle(folder, future)
        self.finish()  # the slots of the last one are among those that are set aside
        self.holder.wait_until_captured()
        self._drop_removed()
        if self._unsure:
            self._drop_lost()
        if sum(folder.parent == series for folder in self._ids) > keep:
            self._rotate(series, keep)  # that failed last time
        others = sum(folder.parent != series for folder in self._ids)
        self.holder.reserve(beside + others)
        self._unsure = True
        number = self._session.begin_snapshot()
        self._known, self._unsure = number, False
        try:
            self._last = handle
            self._pool.submit(self._run, future, number, folder, keep, context)
        except BaseException:  # the interpreter ends, or Ctrl-C
            if future.cancel():
                handle.forget()
                self._session.drop_snapshot(number)
            raise
        return handle

    def _drop_lost(self) -> None:
        """Gives up those whose numbers an exception has lost. The holder knows its own."""
        for number in range(self._known + 1, self._session.begin_snapshot() + 1):
            if number != self.holder.number:
                self._session.drop_snapshot(number)

    def _run(self, future: Future[None], *what: Any) -> None:
        """On the thread, unless it was called off."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._failed:
                clean_up(self._drives)
            self._failed = False
            self._write(*what)
        except BaseException as error:
            self._failed = True
            future.set_exception(error)
        else:
            future.set_result(None)

    def make_room_to_hold(self) -> None:
        """Room for what self.holder is to hold. Raises StrataError where there can be none."""
        self.finish()
        self._drop_removed()
        self.holder.make_room(len(self._ids))

    def _drop_removed(self) -> None:
        """Gives up the slots of those that somebody else has removed."""
        for folder in [f for f in self._ids if not (f / MANIFEST_NAME).exists()]:
            self._session.drop_snapshot(self._ids[folder])  # twice, after Ctrl-C, is no harm
            del self._ids[folder]

    def _write(self, number: int, folder: Path, keep: int, context: _Context) -> None:
        """On the thread."""
        session = self._session
        try:
            pages = session.snapshot(number)  # waits
            session.make_pages_durable()
            links = Links(self._drives, folder)
            try:
                self._write_folder(folder, links, pages, context)
                links.finish()
            except BaseException:
                if links.lead_to_what_is_there():
                    links.leave()
                    self._keep(folder, number)
                else:
                    links.remove()
                raise
        except BaseException:
            if self._ids.get(folder) != number:
                with contextlib.suppress(RuntimeError):  # the session may have ended
                    session.drop_snapshot(number)
            raise
        self._keep(folder, number)
        self._rotate(folder.parent, keep)

    def _rotate(self, series: Path, keep: int) -> None:
        """Removes all but the newest."""
        finish_removals(series)
        for old in snapshots_of(series)[:-keep]:
            remove_snapshot(old)
            if old in self._ids:
                self._session.drop_snapshot(self._ids.pop(old))

    def _keep(self, folder: Path, number: int) -> None:
        """Its manifest is there: so its slots stay, also where something failed behind that."""
        replaced = self._ids.pop(folder, None)
        self._ids[folder] = number
        if replaced is not None:
            self._session.drop_snapshot(replaced)

    def _write_folder(
        self, folder: Path, links: Links, pages: dict[str, Any], context: _Context
    ) -> None:
        manifest = context.manifest | {"id": links.id, "page_bytes": pages["page_bytes"]}
        manifest["chunks"] = pages["chunks"]
        for place, step in enumerate(pages["param_steps"]):
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
            manifest["drives"] = links.drive_entries() if linked else self._copy(pages, new)
            with TensorWriter(new / STATE_NAME) as file:
                _write_state(file, manifest, pages["scales"], context)
                manifest["bytes"] = file.bytes
            write_manifest(new, manifest)
        if replaced is not None:
            remove_links(*replaced)

    def _copy(self, pages: dict[str, Any], folder: Path) -> list[dict[str, str]]:
        log.warning(
            "the file systems of %s have no hard links: snapshots are copied to %s, page by page",
            ", ".join(self._drives),
            folder.parent.parent,
        )
        files = self._session.page_files()
        try:
            names = copy_pages(files, slots_of(pages), pages["page_bytes"], folder)
        finally:
            for file in files:
                os.close(file)
        return [{"folder": "", "file": name} for name in names]


def _context(state: Wrapped, extra: dict[str, Any]) -> _Context:
    """Takes what is in no page. Its time does not depend on the parameters' sizes."""
    check_buffers(state.model)
    tensors: list[torch.Tensor] = []
    layout = model_layout(state)
    buffers = persistent_buffers(state.model)
    manifest: dict[str, Any] = {
        "snapshot": FORMAT,
        "step": state.steps_before + state.session.steps(),
        "time": time.time_ns(),
        "moment_dtype": state.config["moment_dtype"],
        "params": layout["params"],
        "parts": parts_of(state),
        "buffers": layout["buffers"],
        "groups": plain_groups(state),
        "rng": rng.capture(),
        "extra": _taken_out(extra, tensors),
    }
    for tensor, entry in zip(stored_tensors(state.model), manifest["params"], strict=True):
        entry |= {"step": 0, "rule": rule_of(state, tensor)}
    json.dumps(manifest)  # raises now, and not on the thread
    values = [value.detach().to("cpu", copy=True) for value in buffers.values()]
    return _Context(manifest, values, tensors)


def rule_of(state: Wrapped, tensor: StoredTensor) -> str:
    """Whose moments are kept of the tensor."""
    group = state.config["groups"][state.config["params"][tensor.parts[0]]["group"]]
    return group["rule"] if moments_of(group) else "sgd"


def parts_of(state: Wrapped) -> list[list[int]]:
    """By parameter: its tensor, and its first element there."""
    parts: list[list[int]] = [[] for _ in state.config["params"]]
    for place, tensor in enumerate(stored_tensors(state.model)):
        first = 0
        for part, shape in zip(tensor.parts, tensor.part_shapes, strict=True):
            parts[part] = [place, first]
            first += math.prod(shape)
    return parts


def _taken_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with numbers in the place of its tensors, which go to the list as they are now."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().to("cpu", copy=True))
        return {TENSOR_KEY: len(tensors) - 1}
    if isinstance(value, dict):
        if TENSOR_KEY in value:
            raise TypeError(f"extra has a key {TENSOR_KEY!r}, which stands for tensors")
        return {key: _taken_out(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_taken_out(each, tensors) for each in value]
    return value


def _write_state(
    file: TensorWriter, manifest: dict[str, Any], scales: bytes, context: _Context
) -> None:
    def append(kind: str, value: torch.Tensor) -> Record:
        return file.append(kind, dtype_name(value.dtype), raw_bytes(value))

    for entry, value in zip(manifest["buffers"], context.buffers, strict=True):
        entry["tensors"] = [append("buffer", value)]
    manifest["tensors"] = [
        append("extra", value) | {"shape": list(value.shape)} for value in context.tensors
    ]
    manifest["scales"] = file.append("scales", "uint8", [memoryview(scales)]) if scales else None
