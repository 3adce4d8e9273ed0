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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._optim.groups import moments_of
from .._runtime.wrapped import Wrapped, wrapped
from . import rng
from .checkpoint import (
    buffer_entries,
    check_dense,
    dtype_name,
    model_layout,
    plain_groups,
    raw_bytes,
)
from .checkpoint_files import (
    MANIFEST_NAME,
    STATE_NAME,
    Record,
    TensorWriter,
    replace_folder,
)
from .held_state import Holder
from .registrations import persistent_places, registrations
from .snapshot_files import (
    FORMAT,
    Links,
    clean_up,
    copy_pages,
    give_way,
    links_at,
    remove_links,
    remove_snapshot,
    slots_of,
    snapshots_of,
    step_folder,
    write_large_manifest,
)
from .stored import StoredTensor, stored_tensors

if TYPE_CHECKING:
    from .._core import TakenSnapshot

TENSOR_KEY = "strata.tensor"

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

    It returns at once, whatever the model's size. What waits, if need be, is a later step(): until
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
        extra: JSON values and tensors, which strata.load() gives back.

    Returns:
        A handle: `wait()` returns when the snapshot is complete, `complete` tells whether it is.

    Raises:
        StrataError: Where the budget of the SSD has no such room, with what would do; where there
            is no SSD; between a backward and step() with update="in_backward", where some
            parameters are updated and others are not; and what an earlier snapshot failed with.
        RuntimeError: Likewise, where parameters are of two states, or the model has others than
            when it was wrapped.
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
    buffers: dict[str, torch.Tensor]
    tensors: list[torch.Tensor]


@dataclass
class _Form:
    """What is the same for every snapshot of a model, as manifests have it."""

    params: list[dict[str, Any]]
    parts: list[list[int]]


class Taker:
    """Takes the snapshots of one wrapped model, one behind the other.

    What grows with the model is left to its thread, but for persistent buffers, which are copied by
    who asks; where they are is looked up anew only when a module somewhere got a parameter, a
    buffer or a module."""

    def __init__(self, state: Wrapped) -> None:
        """Removes what killed processes left on the drives."""
        self._session = state.session
        self._drives = [os.path.realpath(path) for path in state.config["ssd_paths"]]
        self._ids: dict[Path, int] = {}  # the core's, of those that are complete
        self._handles: list[SnapshotHandle] = []  # not seen to be complete, the oldest first
        self.holder = Holder(self._session, self._drives)
        # Its thread ends what was begun before the interpreter goes.
        self._pool = ThreadPoolExecutor(1, "strata-snapshot")
        self._room = ThreadPoolExecutor(1, "strata-snapshot-room")
        self._form: _Form | None = None
        self._buffers: list[tuple[str, nn.Module, str]] = []
        self._registered = -1
        clean_up(self._drives)

    def raise_failure(self) -> None:
        """Raises what one failed with, once."""
        self.holder.raise_failure()
        for handle in [h for h in self._handles if h.done]:
            self._handles.remove(handle)
            handle.raise_failure()

    def finish(self) -> None:
        """Waits for all of them. Raises nothing: what is not complete is not there."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                handle.wait()

    def take(
        self, state: Wrapped, series: Path, keep: int, beside: int, extra: dict[str, Any]
    ) -> SnapshotHandle:
        """Begins one. `beside`: complete ones of the series meanwhile."""
        if self._registered != registrations.count:
            if self._registered >= 0:
                state.check_parameters()
                self._form = None
            self._registered = registrations.count
            self._buffers = persistent_places(state.model)
            registrations.watch(state.model)
        context = _context(state, self._buffers, extra)
        self._drop_removed()
        others = sum(folder.parent != series for folder in list(self._ids))
        number, room_missing = self.holder.begin(beside + others)
        folder = step_folder(series, context.manifest["step"])
        try:
            if room_missing:
                self._room.submit(self._session.make_snapshot_room)
            future = self._pool.submit(self._write, state, number, folder, keep, context)
        except BaseException:  # the interpreter ends, or Ctrl-C
            self._session.drop_snapshot(number)
            raise
        handle = SnapshotHandle(folder, future)
        self._handles.append(handle)
        return handle

    def make_room_to_hold(self) -> None:
        """Room for what self.holder is to hold. Raises StrataError where there can be none."""
        self.finish()
        self._drop_removed()
        self.holder.make_room(len(self._ids))

    def _drop_removed(self) -> None:
        """Gives up the slots of those that somebody else has removed."""
        for folder in [f for f in list(self._ids) if not (f / MANIFEST_NAME).exists()]:
            number = self._ids.pop(folder, None)  # unless the thread has
            if number is not None:
                self._session.drop_snapshot(number)

    def _write(
        self, state: Wrapped, number: int, folder: Path, keep: int, context: _Context
    ) -> None:
        """On the thread."""
        session = self._session
        try:
            form = self._form
            if form is None:
                state.check_parameters()
                form = self._form = _form(state)
            pages = session.snapshot(number)  # waits
            session.make_pages_durable()
            links = Links(self._drives, folder)
            try:
                self._write_folder(folder, links, pages, form, context)
                links.finish()
            except BaseException:
                links.remove()
                raise
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the session may have ended
                session.drop_snapshot(number)
            raise
        replaced = self._ids.pop(folder, None)
        self._ids[folder] = number
        if replaced is not None:
            session.drop_snapshot(replaced)
        for old in snapshots_of(folder.parent)[:-keep]:
            remove_snapshot(old)
            if old in self._ids:
                session.drop_snapshot(self._ids.pop(old))

    def _write_folder(
        self, folder: Path, links: Links, pages: TakenSnapshot, form: _Form, context: _Context
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
        replaced = links_at(folder)  # of another run that came by this step
        linked = self._session.link_pages(links.paths)
        if linked:
            links.sync()
        with replace_folder(folder) as new:
            manifest["drives"] = links.drive_entries() if linked else self._copy(manifest, new)
            with TensorWriter(new / STATE_NAME) as file:
                _write_state(file, manifest, context)
                manifest["bytes"] = file.bytes
            write_large_manifest(new, manifest)
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
            names = copy_pages(files, slots_of(manifest), manifest["page_bytes"], folder)
        finally:
            for file in files:
                os.close(file)
        return [{"folder": "", "file": name} for name in names]


def _context(
    state: Wrapped, places: list[tuple[str, nn.Module, str]], extra: dict[str, Any]
) -> _Context:
    """Takes what is in no page. Its time does not depend on the parameters, nor on their number."""
    tensors: list[torch.Tensor] = []
    buffers = {name: module._buffers[key] for name, module, key in places}
    values = {name: value for name, value in buffers.items() if value is not None}
    check_dense(values)
    manifest: dict[str, Any] = {
        "snapshot": FORMAT,
        "step": state.steps_before + state.steps,
        "time": time.time_ns(),
        "moment_dtype": state.config["moment_dtype"],
        "buffers": buffer_entries(values),
        "groups": plain_groups(state),
        "rng": rng.capture(),
        "extra": _taken_out(extra, tensors),
        "gradients": None,
        "zeros": sorted(state.gradients.hand_over()),
        "sums": {"float32": state.config["accumulate"]},
    }
    json.dumps(manifest)  # raises now, and not on the thread
    copies = {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
    return _Context(manifest, copies, tensors)


def _form(state: Wrapped) -> _Form:
    params = model_layout(state)["params"]
    for tensor, entry in zip(stored_tensors(state.model), params, strict=True):
        entry |= {"step": 0, "rule": rule_of(state, tensor)}
    return _Form(params, parts_of(state))


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


def _write_state(file: TensorWriter, manifest: dict[str, Any], context: _Context) -> None:
    def append(kind: str, value: torch.Tensor) -> Record:
        return file.append(kind, dtype_name(value.dtype), raw_bytes(value))

    for entry in manifest["buffers"]:
        entry["tensors"] = [append("buffer", context.buffers[entry["name"]])]
    manifest["tensors"] = [
        append("extra", value) | {"shape": list(value.shape)} for value in context.tensors
    ]
