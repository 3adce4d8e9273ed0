"""Files of wrapped models: checkpoints to go on from, and exports that others read.

strata.checkpoint.save(model, "checkpoint/")            # also strata.save
strata.checkpoint.snapshot(model, "runs/llama")         # also strata.snapshot: training goes on
strata.checkpoint.load(model, "checkpoint/")            # or a snapshot, or their series
strata.checkpoint.export_safetensors(model, "out/")
strata.checkpoint.tile_as(model, "checkpoint/")         # ahead of strata.wrap(): the same bits
"""

from ._storage.checkpoint_files import CheckpointError
from ._storage.export import export_safetensors
from ._storage.saving import save
from ._storage.snapshots.capture import SnapshotHandle, snapshot
from ._storage.snapshots.load import load
from ._storage.tiled import tile_as

__all__ = [
    "CheckpointError",
    "SnapshotHandle",
    "export_safetensors",
    "load",
    "save",
    "snapshot",
    "tile_as",
]
