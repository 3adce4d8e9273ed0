"""Saving: the form of a checkpoint that can be copied as a folder, and that other tools read.

    strata.save(model, "checkpoint/", extra={"batch": 120})
    handle = strata.save(model, "checkpoint/", wait=False)        # training goes on
    handle.wait()

Format, version 2. A checkpoint is a folder of safetensors files (shards.py) and a manifest:

    manifest.json  as version 1 has it (checkpoint.py), with
                   "version": 2,
                   "files":   [{"file", "bytes"}],
                   "step":    of the run,
                   and of each tensor the "file" that it lies in; "offset" counts from its begin

Complete or absent, as version 1: see Note [Complete or absent] in checkpoint.py.

Note [What is saved while training goes on]. With wait=False the state is captured as a snapshot
captures it, held, and written by a thread of its own (held_state.py). With wait=True nobody trains
meanwhile, so values are read from where they rest, and nothing is written but the files.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._core import Hasher
from .._errors import StrataError
from .._optim.groups import moments_of
from .._runtime.wrapped import Wrapped, wrapped
from . import rng
from .checkpoint import (
    Meter,
    Progress,
    check_buffers,
    model_layout,
    plain_groups,
    raw_bytes,
    stored_values,
)
from .checkpoint_files import (
    BUFFER_BYTES,
    CheckpointError,
    Record,
    check_replaceable,
    replace_folder,
    write_manifest,
)
from .extras import to_json
from .held_state import Holder
from .pace import Pace
from .shards import Earlier, ShardWriter, Wanted, cut, describe
from .snapshot import Taker
from .snapshot_elements import Form
from .snapshot_files import links_at
from .snapshot_values import Forms, SnapshotValues
from .stored import StoredTensor, persistent_buffers, stored_tensors

if TYPE_CHECKING:
    from .._core import TakenSnapshot

Values = Callable[[StoredTensor, Record], Iterator[memoryview]]
"""The bytes of a tensor, as the manifest's record of it says."""

WAITS = "strata.save(wait=False) holds training up until it is done"

log = logging.getLogger("strata")


class SaveHandle:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, future: Future[None], holder: Holder | None = None) -> None:
        """strata.save() makes it. `holder`: whose thread writes it."""
        self.path = path
        self._future = future
        self._holder = holder

    @property
    def complete(self) -> bool:
        """Whether it is on the disk, whole."""
        return self._future.done() and self._future.exception() is None

    def wait(self, timeout: float | None = None) -> Path:
        """Returns the checkpoint's folder when it is complete. From here on it takes as much of the
        disk as it can. Raises what it failed with, and TimeoutError after so many seconds."""
        if self._holder is not None:
            self._holder.hurry(self._future)
        try:
            self._future.result(timeout)
        finally:
            if self._holder is not None and self._future.done():
                self._holder.was_told(self._future)
        return self.path


def save(
    model: nn.Module,
    path: str | Path,
    *,
    wait: bool = True,
    extra: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Writes a checkpoint of a wrapped model, which takes the place of an older one at `path`. Its
    folder may be copied and moved; safetensors files in it have all tensors.

    Files of the last checkpoint of the run are linked, not written again, where nothing in them has
    changed: frozen parameters, and experts that saw no token. AdamW changes all that it trains.

    Args:
        model: A wrapped model.
        path: A folder, or where one will be.
        wait: False: returns when the state is held, and a thread writes it while training goes on,
            for a third of the time at most: training has the disk for the rest. As soon as somebody
            waits for it, by the handle's wait(), another save or a load, it goes on without rests.
            That takes room on the SSD: once the state of what is trained, and once that of what is
            frozen. Without an SSD, or without the room, it waits all the same, and says so.
        extra: JSON values and tuples, which strata.load() gives back. Keys of dictionaries may be
            strings, numbers, booleans and None.
        progress: Called with the bytes done and the bytes in all; with wait=False by the thread.

    Returns:
        A handle: `wait()` returns when the checkpoint is complete, `complete` tells whether it is.

    Raises:
        CheckpointError: `path` is something else, or cannot be replaced.
        StrataError: with wait=False where pages could not be made durable for a snapshot.
        TypeError: `extra` or a hyperparameter is nothing that can be kept.

    Memory used: 4 MiB; with wait=False 32 MiB more.
    """
    state = wrapped(model)
    if state.ranks is not None:
        raise ValueError(
            "snapshots and checkpoints of several ranks are not there yet: "
            "strata.export_safetensors() writes the parameters, on any rank"
        )
    state.check_parameters()
    state.hooks.reset()
    state.refuse_half_step("save()")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    path = Path(os.path.realpath(path))
    check_replaceable(path)
    if links_at(path) is not None:
        raise CheckpointError(f"{path} is a snapshot, and no checkpoint; not replacing it")
    if not wait and not _merges(state) and (taker := _taker(state)) is not None:
        work = _work(state, path, extra, progress)
        forms, engine = _forms(state), state.config["io_engine"]
        future = taker.holder.hold(
            path, lambda held, links, pace: _write_held(work, held, forms, links, engine, pace)
        )
        if future is not None:
            state.last_saved = path
            return SaveHandle(path, future, taker.holder)
        log.warning("%s: there are no hard links on the drives", WAITS)
    state.synchronize()
    work = _work(state, path, extra, progress)
    buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device="cpu")
    for tensor, entry in zip(work.tensors, work.manifest["params"], strict=True):
        entry["step"] = state.session.param_step(tensor.parts[0])
    pace = Pace()
    pace.hurry()
    work.write(lambda tensor, record: stored_values(state, tensor, record, buffer), pace)
    state.last_saved = path
    done: Future[None] = Future()
    done.set_result(None)
    return SaveHandle(path, done)


def _taker(state: Wrapped) -> Taker | None:
    """Of snapshots, with room for the one that is saved. None: there is none; the log says why.
    Raises StrataError where page files cannot be relied on."""
    if state.snapshots is not None:
        state.snapshots.raise_failure()
    try:
        taker: Taker = state.snapshots or Taker(state)
        state.snapshots = taker
        state.landings.wait()
        taker.make_room_to_hold()
        taker.durability.check()  # what was under way is known now
    except StrataError as error:
        if error.fault != "config":
            raise
        log.warning("%s: %s", WAITS, error)
        return None
    return taker


def _merges(state: Wrapped) -> bool:
    """Gradients have landed, maybe on those of earlier steps, whose updates a state that is held
    would not have."""
    merges = state.config["update"] == "lock_free" and any(state.landed)
    if merges:
        log.warning("%s: gradients have landed since the last step()", WAITS)
    return merges


def _forms(state: Wrapped) -> Forms:
    specs, groups = state.config["params"], state.config["groups"]
    used = [groups[spec["group"]] for spec in specs]
    rules = [group["rule"] if moments_of(group) else "sgd" for group in used]
    params = [Form(spec["dtype"], rule) for spec, rule in zip(specs, rules, strict=True)]
    return Forms(params, state.config["moment_dtype"])


def _write_held(
    work: _Work, pages: TakenSnapshot, forms: Forms, links: list[str], io_engine: str, pace: Pace
) -> None:
    """On the thread, which knows plain values only."""
    values = SnapshotValues(pages, forms, links, io_engine)
    for place, step in enumerate(pages.param_steps):
        entry = work.manifest["params"][work.parts[place]]
        entry["step"] = max(entry["step"], step)
    work.write(values.read, pace)


@dataclass
class _Work:
    """A checkpoint to be written, and what is in no page, as it was when it was asked for."""

    path: Path
    earlier: Earlier
    manifest: dict[str, Any]  # without steps and digests
    tensors: list[StoredTensor]
    parts: list[int]  # by parameter: its tensor
    buffers: list[torch.Tensor]
    meter: Meter

    def write(self, values: Values, pace: Pace) -> None:
        """The folder takes its place. REQUIRES: the manifest has steps."""
        sources = self._sources(values)
        wanted = [tensor for tensor, _ in sources.values()]

        def chunks(tensor: Wanted) -> Iterator[memoryview]:
            return sources[tensor.name, tensor.kind][1]()

        def digest(tensor: Wanted) -> str:
            found = Hasher()
            for chunk in pace(chunks(tensor)):
                found.update(chunk)
            return found.hexdigest()

        with replace_folder(self.path) as folder:
            records = self.earlier.link_unchanged(wanted, digest, folder)
            self.meter.add(sum(record["bytes"] for record in records.values()))
            names = {record["file"] for record in records.values()}
            left = [t for t in wanted if (t.name, t.kind) not in records]
            for shard in cut(left, self.earlier.quiet):
                with ShardWriter(folder, shard, names) as file:
                    for tensor in shard.tensors:
                        paced = pace(self.meter(chunks(tensor)), file.flush)
                        record = file.write(tensor, paced)
                        records[tensor.name, tensor.kind] = record
            for entry in (*self.manifest["params"], *self.manifest["buffers"]):
                entry["tensors"] = [records[entry["name"], r["kind"]] for r in entry["tensors"]]
            write_manifest(folder, self.manifest | {"files": describe(folder, names)})

    def _sources(
        self, values: Values
    ) -> dict[tuple[str, str], tuple[Wanted, Callable[[], Iterator[memoryview]]]]:
        """Each tensor, and where its bytes come from."""
        found = {}
        for tensor, entry in zip(self.tensors, self.manifest["params"], strict=True):
            for record in entry["tensors"]:
                wanted = _wanted(entry, record, entry["trainable"])
                found[tensor.name, record["kind"]] = (wanted, _of(values, tensor, record))
        for value, entry in zip(self.buffers, self.manifest["buffers"], strict=True):
            wanted = _wanted(entry, entry["tensors"][0], True)
            found[entry["name"], "buffer"] = (wanted, _plain(value))
        return found


def _of(values: Values, tensor: StoredTensor, record: Record) -> Callable[[], Iterator[memoryview]]:
    return lambda: values(tensor, record)


def _plain(value: torch.Tensor) -> Callable[[], Iterator[memoryview]]:
    return lambda: raw_bytes(value)


def _wanted(entry: Record, record: Record, changes: bool) -> Wanted:
    return Wanted(
        entry["name"],
        record["kind"],
        record["dtype"],
        tuple(entry["shape"]),
        record["bytes"],
        entry.get("step", 0),
        changes,
    )


def _work(
    state: Wrapped, path: Path, extra: dict[str, Any] | None, progress: Progress | None
) -> _Work:
    """Takes what is in no page."""
    check_buffers(state.model)
    context = {
        "step": state.steps_before + state.session.steps(),
        "groups": plain_groups(state),
        "rng": rng.capture(),
        "extra": to_json(extra or {}, None),
    }
    context = json.loads(json.dumps(context))  # raises now, not when all tensors are written
    manifest = model_layout(state) | context
    tensors = stored_tensors(state.model)
    parts = [0] * len(state.config["params"])
    for i, (tensor, entry) in enumerate(zip(tensors, manifest["params"], strict=True)):
        entry["step"] = 0
        for part in tensor.parts:
            parts[part] = i
    return _Work(
        path,
        Earlier.find([path, state.last_saved]),
        manifest,
        tensors,
        parts,
        [value.detach().to("cpu", copy=True) for value in persistent_buffers(state.model).values()],
        Meter(progress, manifest["bytes"]),
    )
