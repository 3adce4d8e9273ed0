"""Saving: the form of a checkpoint that can be copied as a folder, and that other tools read.

    strata.save(model, "checkpoint/", extra={"batch": 120})

Format, version 2. A checkpoint is a folder of safetensors files (shards.py) and a manifest:

    manifest.json  {"checksum": XXH3-64 of the rest as canonical JSON, "version": 2,
                    "files":   [{"file", "bytes"}],
                    "bytes":   of all tensors,
                    "step":    of the run,
                    "params":  [{"name", "shape", "dtype", "trainable", "step", "tensors",
                                 "group": its place in "groups", "tiles": how many the layer was
                                 cut into, "stored": the form of its codes, where it has any}],
                    "buffers": [{"name", "shape", "tensors"}],
                        where tensors is [{"kind", "dtype", "file", "offset": in the file, "bytes",
                        "xxh3_64"}]
                    "groups":  the optimizer's parameter groups without their parameters; keys that
                               are no options of its class as saved_values.py has them,
                    "extra_state": what modules say by get_extra_state(), by its name in a state
                               dict, as saved_values.py has it,
                    "rng":     the states of torch (CPU, CUDA), random and numpy,
                    "extra":   what the caller gave, as extras.py has it,
                    "others":  where several ranks have saved it: [{"rng", "extra"}], of ranks
                               1, 2, ...: the fields of these names beside them are rank 0's}

The tiles of a layer are one parameter here. Per parameter, in the order of model.parameters(), the
tensors are its master (float32; of a frozen parameter its own dtype), then moment1 and moment2
(float32) as far as its rule keeps them. Persistent buffers have their own dtype. See Note [Complete
or absent] in checkpoint_files.py.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._config.paths import AnyPath, as_path
from .._runtime.wrapped import Wrapped, wrapped
from .checkpoint import Progress, stored_values
from .checkpoint_files import BUFFER_BYTES, CheckpointError, check_replaceable
from .checkpoint_writer import Work
from .snapshots.format import links_at
from .together import Together, owned


def save(
    model: nn.Module,
    path: AnyPath,
    *,
    extra: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
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
        extra: JSON values and tuples, which strata.load() gives back. Keys of dictionaries may be
            strings, numbers, booleans and None. Of several ranks each gives its own, and gets that
            back under the same number of ranks; under another number all get rank 0's.
        progress: Called with the bytes done and the bytes in all. Of several ranks with those that
            this rank has written, and at the end with all.

    Raises:
        CheckpointError: `path` is something else, or cannot be replaced; another rank has failed,
            which the message names and which raises what it failed with; ranks gave different
            paths, or made different calls.
        OSError: The files cannot be written. What was at `path` is still there.
        StrataError: A page could not be read; another rank has died.
        RuntimeError: Between backward() and step(): a checkpoint has no gradients.
        TypeError: `extra` or a hyperparameter is nothing that can be kept.

    Memory used: 4 MiB.
    """
    state = wrapped(model)
    together = Together.of(state, "strata.save()")
    with together.phase() as phase:
        path = _check(state, path, extra)
        phase.said = str(path)
    together.agree("paths", phase.heard)
    with together.phase() as phase:
        state.synchronize()
        work = Work.of(state, path, extra, progress, together)
        for tensor, entry in zip(work.tensors, work.manifest["params"], strict=True):
            entry["step"] = _steps_of(state, tensor.parts[0])
        phase.said = work.said()
    work.join(phase.heard)
    buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device="cpu")
    work.write(partial(stored_values, state, buffer=buffer))
    state.last_saved = path


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
    state.refuse_within_step("save()")
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dictionary or None, not {extra!r:.60}")
    path = Path(os.path.realpath(as_path(path)))
    check_replaceable(path)
    if links_at(path) is not None:
        raise CheckpointError(f"{path} is a snapshot, and no checkpoint; not replacing it")
    return path
