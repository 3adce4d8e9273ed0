"""Saving: the form of a checkpoint that can be copied as a folder, and that other tools read.

    strata.save(model, "checkpoint/", extra={"batch": 120})
    handle = strata.save(model, "checkpoint/", wait=False)        # training goes on
    handle.wait()

Format, version 2. A checkpoint is a folder of safetensors files (shards.py) and a manifest:

    manifest.json  as version 1 has it (checkpoint.py), with
                   "version": 2,
                   "files":   [{"file", "bytes"}],
                   "step":    of the run,
                   and of each tensor the "file" that it lies in; "offset" counts from its begin;
                   where several ranks have saved it
                   "others":  [{"rng", "extra"}], of ranks 1, 2, ...: the fields of these names
                              beside them are rank 0's

Complete or absent, as version 1: see Note [Complete or absent] in checkpoint.py.

Note [What is saved while training goes on]. With wait=False the state is captured as a snapshot
captures it, held, and written by a thread of its own (held_state.py). With wait=True nobody trains
meanwhile, so values are read from where they rest, and nothing is written but the files.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._config.paths import AnyPath, as_path
from .._errors import StrataError
from .._optim.groups import moments_of
from .._runtime.wrapped import Wrapped, wrapped
from .checkpoint import Progress, stored_values
from .checkpoint_files import BUFFER_BYTES, CheckpointError, check_replaceable
from .checkpoint_writer import Values, Work
from .held_state import Holder
from .pace import Pace
from .snapshot import Taker, taker_of
from .snapshot_elements import Form
from .snapshot_files import links_at
from .snapshot_parts import own_chunks, read_part, remove_part, write_lines
from .snapshot_values import Forms, Share, SnapshotValues
from .together import Together, owned

if TYPE_CHECKING:
    from .._core import TakenSnapshot

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
    path: AnyPath,
    *,
    wait: bool = True,
    extra: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Writes a checkpoint of a wrapped model, which takes the place of an older one at `path`. Its
    folder may be copied and moved; safetensors files in it have all tensors.

    Files of the last checkpoint of the run are linked, not written again, where nothing in them has
    changed: frozen parameters, and experts that saw no token. AdamW changes all that it trains.

    Of several ranks each one calls it, with the same path, and writes a part; nobody goes on until
    all parts are on the disk and the checkpoint is complete. Killed at any moment, or where a rank
    fails, the old checkpoint is there, or the new one, whole. It is one as a process that is alone
    writes it, and loads under any number of ranks. It has the random states and `extra` of each
    rank, and buffers of rank 0.

    Args:
        model: A wrapped model.
        path: A folder, or where one will be.
        wait: False: returns when the state is held, and a thread writes it while training goes on,
            for a third of the time at most: training has the disk for the rest. As soon as somebody
            waits for it, by the handle's wait(), another save or a load, it goes on without rests.
            That takes room on the SSD: once the state of what is trained, and once that of what is
            frozen. Without an SSD, or without the room, it waits all the same, and says so; so do
            all ranks where one of them cannot, and behind a backward.
        extra: JSON values and tuples, which strata.load() gives back. Keys of dictionaries may be
            strings, numbers, booleans and None. Of several ranks each gives its own, and gets that
            back under the same number of ranks; under another number all get rank 0's.
        progress: Called with the bytes done and the bytes in all; with wait=False by the thread. Of
            several ranks with those that this rank has written, and at the end with all.

    Returns:
        A handle: `wait()` returns when the checkpoint is complete, `complete` tells whether it is.

    Raises:
        CheckpointError: `path` is something else, or cannot be replaced; another rank has failed,
            which the message names and which raises what it failed with; ranks gave different
            paths, or made different calls.
        OSError: The files cannot be written. What was at `path` is still there.
        StrataError: A page could not be read; another rank has died; with wait=False where pages
            could not be made durable for a snapshot.
        TypeError: `extra` or a hyperparameter is nothing that can be kept.

    Memory used: 4 MiB; with wait=False 32 MiB more.
    """
    state = wrapped(model)
    together = Together.of(state, "strata.save()")
    with together.phase() as phase:
        path = _check(state, path, extra)
        phase.said = [str(path), wait]
    for what, values in zip(("paths", "wait="), zip(*phase.heard, strict=True), strict=True):
        together.agree(what, list(values))
    if not wait and (handle := _hold(state, path, extra, progress, together)) is not None:
        return handle
    with together.phase() as phase:
        state.synchronize()
        work = Work.of(state, path, extra, progress, together)
        for tensor, entry in zip(work.tensors, work.manifest["params"], strict=True):
            entry["step"] = _steps_of(state, tensor.parts[0])
        phase.said = work.said()
    work.join(phase.heard)
    buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device="cpu")
    pace = Pace()
    pace.hurry()
    read = partial(stored_values, state, buffer=buffer)
    work.write(lambda folder: read, pace)
    state.last_saved = path
    done: Future[None] = Future()
    done.set_result(None)
    return SaveHandle(path, done)


def _steps_of(state: Wrapped, param: int) -> int:
    """That the parameter has made. Ranks that own nothing of it do not know of updates that a late
    one has taken along: 0, and who does says it."""
    ranks = state.ranks
    empty = state.config["params"][param]["numel"] == 0
    counts = ranks is None or empty or owned(state, param, ranks.rank)
    return state.session.param_step(param) if counts else 0


def _check(state: Wrapped, path: AnyPath, extra: dict[str, Any] | None) -> Path:
    """The folder to be written. Raises where the state, or what is there, is no such."""
    state.check_parameters()
    state.hooks.reset()
    state.refuse_half_step("save()")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    path = Path(os.path.realpath(as_path(path)))
    check_replaceable(path)
    if links_at(path) is not None:
        raise CheckpointError(f"{path} is a snapshot, and no checkpoint; not replacing it")
    return path


def _hold(
    state: Wrapped,
    path: Path,
    extra: dict[str, Any] | None,
    progress: Progress | None,
    together: Together,
) -> SaveHandle | None:
    """The state is held, and a thread writes it. None: it cannot be; the log says why."""
    with together.phase() as phase:
        taker = None if _merges(state) else _taker(state)
        phase.said = taker is not None
    if taker is None or not all(phase.heard):
        if taker is not None:
            log.warning("%s: another rank cannot hold its state", WAITS)
        return None
    if together.count > 1:
        taker.tidy(together)
    holder, held = taker.holder, None
    with holder.calls.begin() as call:
        try:
            with together.phase() as phase:
                work = Work.of(state, path, extra, progress, call.together)
                held = holder.hold(path)
                phase.said = held is not None
            if held is None or not all(phase.heard):
                log.warning("%s: there are no hard links on the drives", WAITS)
                if held is not None:
                    holder.let_go(held)
                return None
        except BaseException:
            if held is not None:
                holder.let_go(held)
            raise
        forms, engine = _forms(state), state.config["io_engine"]
        future = holder.write(
            held,
            call,
            lambda pages, links, pace: _write_held(work, pages, forms, links, engine, pace),
        )
    state.last_saved = path
    return SaveHandle(path, future, holder)


def _taker(state: Wrapped) -> Taker | None:
    """Of snapshots, with room for the one that is saved. None: there is none; the log says why.
    Raises StrataError where page files cannot be relied on."""
    if state.snapshots is not None:
        state.snapshots.raise_failure()
    try:
        taker = taker_of(state)
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
    """The state cannot be held. Or gradients have landed that cannot be told from it: on those of
    earlier steps, whose updates it would not have, or on their way to other ranks."""
    if state.ranks is not None and state.ranks.machines:  # each reads what others hold there
        log.warning("%s: of several machines nothing is held", WAITS)
        return True
    apart = state.ranks is None and state.config["update"] != "lock_free"
    merges = not apart and any(map(state.gradients.has_landed, range(len(state.params))))
    if merges:
        log.warning("%s: gradients have landed since the last step()", WAITS)
    return merges


def _forms(state: Wrapped) -> Forms:
    specs, groups = state.config["params"], state.config["groups"]
    used = [groups[spec["group"]] for spec in specs]
    rules = [group["rule"] if moments_of(group) else "sgd" for group in used]
    params = [
        Form(spec["dtype"], rule, spec.get("stored"))
        for spec, rule in zip(specs, rules, strict=True)
    ]
    return Forms(params, state.config["moment_dtype"])


def _write_held(
    work: Work, pages: TakenSnapshot, forms: Forms, links: list[str], io_engine: str, pace: Pace
) -> None:
    """On the thread, which knows plain values only."""
    together = work.together
    with together.phase() as phase:
        for place, step in enumerate(pages.param_steps):
            entry = work.manifest["params"][work.parts[place]]
            entry["step"] = max(entry["step"], step)
        phase.said = work.said()
    work.join(phase.heard)

    def values(folder: Path) -> Values:
        shares = _shares(together, folder, pages, links)
        with together.phase():
            return SnapshotValues(shares, pages.page_bytes, forms, io_engine).read

    work.write(values, pace)


def _shares(
    together: Together, folder: Path, pages: TakenSnapshot, links: list[str]
) -> list[Share]:
    """By rank: what each holds. They tell each other by files in the folder, which go again."""
    if together.count == 1:
        return [Share([chunk for _, chunk in own_chunks(pages)], links)]
    with together.phase():
        write_lines(folder, together.rank, pages, {"links": links})
    shares = []
    with together.phase():
        for rank in range(together.count):
            header, chunks = read_part(folder, rank)
            shares.append(Share([chunk for _, chunk in chunks], header["links"]))
    with together.phase():
        remove_part(folder, together.rank)
    return shares
