"""The tensors that an export writes: by their names in files, and without memory.

    for name, tensor in exported(state, dtype).items():
        tensor.nbytes                                # what it will take
        tensor.clone()                               # its values, read from their pages

They are named, and cut, as save_pretrained() writes the plain model: a tied parameter is there
once, and the tiles of a layer as the tensor they are cut from.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from .._runtime.stand_in import StandIn, make
from .._runtime.visits import Visit
from .._runtime.wrapped import Wrapped
from .checkpoint_files import BUFFER_BYTES
from .conversion import as_in_files
from .stored import StoredTensor, persistent_buffers, stored_tensors


def exported(state: Wrapped, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a wrapped model. `dtype`: of the parameters; None: that which they
    are computed with."""
    model = state.model
    found: dict[str, torch.Tensor] = {}
    for tensor in stored_tensors(model):
        found[_kept_name(model, tensor)] = make(StandIn, Parameter(state, tensor, dtype))
    for name, value in persistent_buffers(model).items():
        found[name] = value.detach().cpu().contiguous()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        found.pop(name, None)
    return as_in_files(model, found)


def _kept_name(model: nn.Module, tensor: StoredTensor) -> str:
    """Of a tied parameter, the name that loaders look for."""
    patterns = set(getattr(model, "all_tied_weights_keys", None) or ())
    kept = [n for n in tensor.names if not any(re.search(pattern, n) for pattern in patterns)]
    return (kept or tensor.names)[0]


class Parameter:
    """One parameter of a wrapped model, or all tiles of one; see Values of stand_in.py."""

    def __init__(self, state: Wrapped, tensor: StoredTensor, dtype: torch.dtype | None) -> None:
        self._state = state
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self.dtype: torch.dtype = dtype or state.aliases[tensor.parts[0]].dtype
        self.device = torch.device("cpu")

    def open(self) -> torch.Tensor:
        """The newest values, in memory of their own."""
        tensor = self._tensor
        result = torch.empty(tensor.shape, dtype=self.dtype, device="cpu")
        rows = result.reshape(-1).split([math.prod(shape) for shape in tensor.part_shapes])
        for param, part in zip(tensor.parts, rows, strict=True):
            self._read(param, part)
        return result

    def close(self, values: Any, changed: bool) -> None:
        """A change would be lost: whoever wants one copies."""
        assert not changed

    def _read(self, param: int, result: torch.Tensor) -> None:
        """Fills `result`, which is flat, with a parameter."""
        if result.dtype == self._state.aliases[param].dtype:
            self._read_computed(param, result)
            return
        count = min(result.numel(), BUFFER_BYTES // 4)
        staging = torch.empty(count, dtype=torch.float32, device="cpu")
        for begin in range(0, result.numel(), max(1, staging.numel())):
            values = staging[: result.numel() - begin]
            self._state.session.read(param, "master", begin, values.data_ptr(), values.numel())
            result[begin : begin + values.numel()] = values

    def _read_computed(self, param: int, result: torch.Tensor) -> None:
        """A parameter as the device computes with it; rounding its master may give a neighbour."""
        unit = self._state.unit_of[param]
        visit = self._state.visits.add(Visit())
        try:
            self._state.enter(unit, visit)
            result.copy_(self._state.aliases[param].detach().reshape(-1))
        finally:
            self._state.leave(unit, visit)
            self._state.visits.end(visit)
