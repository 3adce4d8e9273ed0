"""The tensors that an export writes: by their names in files, and without memory.

    for name, tensor in exported(state, dtype, merge=False).items():
        tensor.nbytes                                # what it will take
        tensor.clone()                               # its values, read from their pages

They are named, and cut, as save_pretrained() writes the plain model: a tied parameter is there
once, and the tiles of a layer as the tensor they are cut from.
"""

from __future__ import annotations

import logging

import torch

from .._runtime.stand_in import StandIn, make
from .._runtime.wrapped import Wrapped
from .conversion import as_in_files
from .extra_state import extra_places
from .merged import merged
from .parameters import Parameter
from .stored import base_model, base_name, kept_name, persistent_buffers, stored_tensors

log = logging.getLogger("strata")


def exported(state: Wrapped, dtype: torch.dtype | None, merge: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a wrapped model. `dtype`: of the parameters; None: that which they
    are computed with. `merge`: of the model inside that PEFT's adapters are in, merged."""
    model = state.model
    found: dict[str, torch.Tensor] = {}
    if merge:
        found = merged(state, dtype)
        model = base_model(model)
    else:
        for tensor in stored_tensors(model):
            name = kept_name(model, tensor.names)
            found[name] = make(StandIn, Parameter(state, tensor, dtype))
    for full, value in persistent_buffers(state.model).items():
        buffer = base_name(state.model, full) if merge else full
        if buffer is not None and buffer not in found:
            found[buffer] = value.detach().cpu().contiguous()
    for name, module in extra_places(model).items():
        value = module.get_extra_state()
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().cpu().contiguous()
        else:
            log.warning("%s is not exported: safetensors files hold tensors alone", name)
    for ignored in getattr(model, "_keys_to_ignore_on_save", None) or ():
        found.pop(ignored, None)
    return as_in_files(model, found)
