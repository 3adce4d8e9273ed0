"""One parameter of a wrapped model, as files have it: read from its pages when it is looked at.

values = Parameter(state, tensor, torch.float32)     # of its master; see Values of stand_in.py
"""

from __future__ import annotations

from typing import Any

import torch

from .._runtime import own_mapping
from .._runtime.visits import Visit
from .._runtime.wrapped import Wrapped
from .checkpoint_files import BUFFER_BYTES
from .stored import StoredTensor


class Parameter:
    """A parameter, or all tiles of one. `dtype`: None: that which it is computed with."""

    def __init__(self, state: Wrapped, tensor: StoredTensor, dtype: torch.dtype | None) -> None:
        self._state = state
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self.dtype: torch.dtype = dtype or state.aliases[tensor.parts[0]].dtype
        self.device = torch.device("cpu")

    def open(self) -> torch.Tensor:
        """The newest values, in memory of their own."""
        tensor = self._tensor
        result = own_mapping.empty(self.shape, self.dtype)
        rows = result.reshape(-1).split(tensor.part_numels)
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
