"""Checkpoints as earlier versions of strata wrote them."""

from pathlib import Path
from typing import Any

import torch
from strata._runtime.wrapped import wrapped
from strata._storage import rng
from strata._storage.checkpoint import (
    dtype_name,
    model_layout,
    plain_groups,
    raw_bytes,
    stored_values,
)
from strata._storage.checkpoint_files import (
    STATE_NAME,
    TensorWriter,
    replace_folder,
    write_manifest,
)
from strata._storage.stored import persistent_buffers, stored_tensors
from torch import nn


def save_version_1(model: nn.Module, path: Path, extra: dict[str, Any]) -> None:
    """All tensors in state.bin, in the order of the model."""
    state = wrapped(model)
    state.synchronize()
    buffer = torch.empty(1 << 16)
    manifest = model_layout(state)
    with replace_folder(path) as folder:
        with TensorWriter(folder / STATE_NAME) as file:
            for tensor, entry in zip(stored_tensors(model), manifest["params"], strict=True):
                entry["step"] = state.session.param_step(tensor.parts[0])
                entry["tensors"] = [
                    file.append(r["kind"], r["dtype"], stored_values(state, tensor, r, buffer))
                    for r in entry["tensors"]
                ]
            values = persistent_buffers(model).values()
            for value, entry in zip(values, manifest["buffers"], strict=True):
                entry["tensors"] = [
                    file.append("buffer", dtype_name(value.dtype), raw_bytes(value))
                ]
        context = {"groups": plain_groups(state), "rng": rng.capture(), "extra": extra}
        write_manifest(folder, manifest | context)
