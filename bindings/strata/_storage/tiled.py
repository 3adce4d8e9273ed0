"""Into how many tiles layers were cut in the run that a checkpoint or snapshot is of.

    tile_as(model, "checkpoint/")            # ahead of strata.wrap(): cut as there
    say_of_tiles(state, manifest, folder)    # a warning where they are cut otherwise

Each entry of a manifest's "params" has "tiles", 1 where the layer was whole. What tiles change is
the last bits of sums alone, so a checkpoint may be loaded with others; not so codes whose groups of
scales tiles would share (checkpoint_manifest.py, check_cuts).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._config.paths import AnyPath, as_path
from .._errors import listed
from .._runtime.wrapped import Wrapped
from ..nn.replace import tile
from .checkpoint_files import CheckpointError, find
from .checkpoint_manifest import in_tiles
from .manifests import read_layout
from .snapshots.series import snapshots_of
from .stored import stored_tensors

log = logging.getLogger("strata")


def tile_as(
    model: nn.Module, path: AnyPath, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Cuts layers into tiles as they were in the run that saved `path`, so that a run under other
    budgets goes on with the same bits. Call it before strata.wrap().

    Args:
        model: as it was ahead of strata.wrap() in that run.
        path: what strata.save() wrote, or strata.snapshot(), or a series of these.
        optimizer: where it is built already: it gets the tiles for the parameters that they take
            the place of.

    Returns:
        The layers that are cut, and into how many tiles each; none where none was.

    Raises:
        CheckpointError: there is none that is complete, or it is damaged.
        ValueError: the model has no such layer, it is cut already, or the model is wrapped.
    """
    path = as_path(path)
    folder = find(path)
    if folder is None:
        newest = snapshots_of(Path(os.path.realpath(path)))
        folder = newest[-1] if newest else None
    if folder is None:
        raise CheckpointError(f"no complete checkpoint at {path}")
    params = read_layout(folder)["params"]
    counts = {e["name"].rpartition(".")[0]: e["tiles"] for e in params if e["tiles"] > 1}
    for layer, count in counts.items():
        tile(model, layer, count, optimizer)
    return counts


def say_of_tiles(state: Wrapped, manifest: dict[str, Any], folder: Path) -> None:
    """Warns where the model's layers are cut otherwise than those of the run that saved it.
    REQUIRES: the manifest fits the model."""
    found: dict[str, str] = {}
    for tensor, entry in zip(stored_tensors(state.model), manifest["params"], strict=True):
        there, here = entry["tiles"], len(tensor.parts)
        if there != here:
            layer = tensor.name.rpartition(".")[0]
            found[layer] = f"{layer!r}, {in_tiles(here)} here and {in_tiles(there)} there"
    if found:
        log.warning(
            "layers are cut otherwise than in the run that saved %s, so last bits may differ from "
            "its: %s; strata.checkpoint.tile_as(model, path) ahead of strata.wrap() cuts them as "
            "there, and a device budget that holds what was whole keeps it whole",
            folder,
            listed(list(found.values())),
        )
