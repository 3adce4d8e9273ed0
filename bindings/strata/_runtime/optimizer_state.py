"""What optimizer.state_dict() holds of a parameter: tensors without memory.

    kept = Kept(state, index, "exp_avg", shape, torch.float32, read)
    is_there(entry["exp_avg"], state, index, "exp_avg")      # True: nothing to load

As in PyTorch, a state dict shows the optimizer's state as it is when it is looked at, not as it was
when the dict was made: a copy of then is copy.deepcopy(state_dict). Each look reads one tensor from
its pages, in float32, and forgets it; torch.save has one at a time in memory. What is changed in
place becomes a copy, of which the optimizer knows nothing: load_state_dict() takes it over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .stand_in import StandIn

if TYPE_CHECKING:
    from .wrapped import Wrapped


class Kept:
    """One tensor of the state of one parameter."""

    def __init__(
        self,
        state: Wrapped,
        index: int,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
    ) -> None:
        self.name = name
        self.place: tuple[int, int, str] | None = (id(state), index, name)
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._state = state
        self._read = read
        self._copy: torch.Tensor | None = None  # it was changed in place

    def open(self) -> torch.Tensor:
        """The values, as they are now."""
        if self._copy is not None:
            return self._copy
        wait_for_updates(self._state)
        return self._read()

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """From its first change on it is a copy."""
        if changed:
            self._copy, self.place = values, None


class StateTensor(StandIn):
    """A tensor of the optimizer's state: its shape and dtype, and no memory."""

    _strata_values: Kept


def wait_for_updates(state: Wrapped) -> None:
    """Waits for the updates that are on their way. Raises where the state cannot be read."""
    if state.model.__dict__.get("_strata") is not state:
        raise RuntimeError(
            "this is the optimizer state of a model that strata.unwrap() has taken back: copy it "
            "(copy.deepcopy(optimizer.state_dict())) ahead of that"
        )
    state.hooks.reset()
    state.refuse_half_step("state_dict() of the optimizer")
    state.synchronize()


def is_there(value: Any, state: Wrapped, index: int, name: str) -> bool:
    """Whether a value that is to be loaded is the very one that it would replace."""
    return isinstance(value, StateTensor) and value._strata_values.place == (id(state), index, name)


def without_others(entry: Any, state: Wrapped, index: int) -> Any:
    """An entry that is to be loaded. What it shows of another parameter is copied: that may be
    loaded over before this one's turn comes."""
    if not isinstance(entry, Mapping):
        return entry
    return {
        name: value.clone() if _is_of(value, state) and not is_there(value, state, index, name)
        else value
        for name, value in entry.items()
    }  # fmt: skip


def _is_of(value: Any, state: Wrapped) -> bool:
    place = value._strata_values.place if isinstance(value, StateTensor) else None
    return place is not None and place[0] == id(state)
