"""Files of wrapped models: checkpoints to go on from, and exports that others read.

strata.checkpoint.save(model, "checkpoint/")             # also strata.save
strata.checkpoint.load(model, "checkpoint/")
strata.checkpoint.export_safetensors(model, "out/")
"""

from ._storage.checkpoint import load, save
from ._storage.checkpoint_files import CheckpointError
from ._storage.export import export_safetensors

__all__ = ["CheckpointError", "export_safetensors", "load", "save"]
