"""Loading snapshots: the session goes on from their pages where they lie (adopt.py), or
they are read, verified, and written to wherever the model has them now.

    extra = load(model, "runs/llama")                # a series, one of its folders, or a checkpoint

Budgets, page size, drives, tiles, the form of moments and the mode of updates may be others than in
the run that took the snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from torch import nn

from ..._config.paths import AnyPath, as_path
from ..._runtime.wrapped import Wrapped, wrapped
from .. import checkpoint, rng
from ..checkpoint import Meter, Progress
from ..checkpoint_files import STATE_NAME, TensorReader, find, read_manifest
from ..extra_state import saved_extra_state, set_extra_state
from ..extras import from_json
from ..manifests import damaged
from ..stored import persistent_buffers
from ..tiled import say_of_tiles
from ..together import Together
from .adopt import adopt
from .capture import taker_of
from .format import is_snapshot, read_snapshot
from .series import snapshots_of
from .source import Source, read_tensor

log = logging.getLogger("strata")


def load(model: nn.Module, path: AnyPath, *, progress: Progress | None = None) -> dict[str, Any]:
    """Continues from a snapshot or a checkpoint: weights, moments, steps, hyperparameters, buffers,
    randomness.

    `path` is what strata.save() wrote, a folder of strata.snapshot(), or the series that it is in:
    then the newest complete one. Budgets, page size and disks may differ from those of the run that
    saved it. A snapshot on the file system of `ssd_path`, with pages like the model's, is not read
    now: each page is, and is verified, when it is first used; a damaged one ends the run then.

    Of several ranks each one calls it, with the same path, and reads what it owns; none returns
    before all have. The number of ranks may be another than when it
    was saved. Where it is the same, each gets back its own random states and `extra`; else all get
    those of rank 0. Buffers are rank 0's on all of them. Load ahead of the first backward, or
    behind step().

    Returns `extra`. Raises CheckpointError, before anything is changed, where there is none that is
    complete, where it is damaged, or of another model, and where another rank fails, which the
    message names; StrataError where a rank dies.
    Where an exception ends it later, Ctrl-C too, and where a page that is read is damaged,
    everything else is refused, on all ranks, until a load has come to its end.
    """
    state = wrapped(model)
    place = as_path(path)
    together = Together.of(state, "strata.load()")
    with together.phase():
        if state.snapshots is not None:  # what is under way may be what is asked for, or remove it
            state.hooks.reset()  # raises in a forked child, which has none of the threads
            state.snapshots.finish()
    snapshot = _find(state, Path(os.path.realpath(place)), together)
    if snapshot is None:
        return checkpoint.load(model, place, progress=progress)
    return _load_snapshot(state, snapshot, progress, together)


def _find(state: Wrapped, path: Path, together: Together) -> Path | None:
    """The folder of the snapshot to load; None: there is none, but maybe a checkpoint. The same for
    all ranks."""
    with together.phase() as phase:
        folder, found = find(path), snapshots_of(path)[::-1]
        if folder is not None:
            found = [folder] if is_snapshot(read_manifest(folder)) else []
        phase.said = str(found[0] if found else None)
    together.agree("paths", phase.heard)
    return found[0] if found else None


def _load_snapshot(
    state: Wrapped, folder: Path, progress: Progress | None, together: Together
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        # 1. All ranks have found the same, and it fits.
        with together.phase() as phase:
            manifest = read_snapshot(folder)
            sizes = {STATE_NAME: manifest["bytes"]}
            file = stack.enter_context(TensorReader(folder, sizes))
            source = Source(manifest, folder, state)
            say_of_tiles(state, manifest, folder)
            groups = checkpoint.merged_groups(state, manifest["groups"], folder)
            of_modules = saved_extra_state(manifest, state.model, str(folder))
            buffers = persistent_buffers(state.model)
            own = checkpoint.said_by(manifest, together)
            records = [(e["name"], e["tensors"][0]) for e in manifest["buffers"]]
            records += [("extra", record) for record in own["tensors"]]
            meter = Meter(progress, source.bytes)
            file.verify(records, lambda _: None)
            tensors = [read_tensor(file, record) for record in own["tensors"]]
            with damaged(f"{folder} is a damaged snapshot"):
                rng.check(own["rng"])
                extra: dict[str, Any] = from_json(own["extra"], tensors)
            phase.said = manifest.get("id")
        together.agree("snapshots", phase.heard)
        source.find_pages(together)
        if together.count > 1:
            taker_of(state).tidy(together)
        # 2. Each rank goes on from its pages where they lie, if all can.
        with together.phase() as phase:
            state.hooks.reset()
            state.steps.forget()
            phase.said = adopt(state, manifest, folder, source.scales_alone, together)
        why = next(filter(None, phase.heard), "")
        # 3. Else each reads what it owns.
        with together.phase():
            if why:
                log.info("%s is read and written page by page: %s", folder, why)
                source.restore(state, meter, together)
            else:
                log.info("the pages of %s are read when they are needed", folder)
                state.session.renew_others()
                meter.add(source.bytes)
            for tensor, entry in zip(source.tensors, manifest["params"], strict=True):
                for place in tensor.parts:
                    state.session.set_param_step(place, entry["step"])
        # 4. What is in no page.
        with together.phase():
            source.restore_steps(state)
            for entry in manifest["buffers"]:
                raw = b"".join(bytes(chunk) for chunk in file.chunks(entry["tensors"][0]))
                checkpoint.set_buffer(buffers[entry["name"]], raw)
            state.steps_before = manifest["step"] - state.session.steps()
            checkpoint.restore_context(state, groups, own["rng"])
    state.steps.end_load()
    set_extra_state(state.model, of_modules)
    return extra
