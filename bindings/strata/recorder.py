"""Records a step as the planner wants it: uses of units with their times, and the tensors that
autograd saves, by storage.

    recorder.begin(detailed=True)
    ...                             # hooks call enter, leave, inputs, saved and used
    events = recorder.end()

Times are always noted, which costs a microsecond; `recording` is true while saved tensors are too.
Use from the thread that trains; autograd's threads call it under the GIL.
"""

from collections.abc import Iterable
from time import perf_counter

import torch

NOT_RECORDED = -1


class Recorder:
    """What happened since begin()."""

    def __init__(self) -> None:
        self.recording = False

    def enter(self, unit: int, backward: bool, asked: float) -> None:
        """A unit has been entered; `asked`: perf_counter() before waiting for it."""

    def leave(self, unit: int) -> None:
        """A unit is left."""

    def inputs(self, unit: int, tensors: Iterable[torch.Tensor]) -> None:
        """The tensors that a unit's forward was called with. Call while `recording`."""

    def saved(self, unit: int, tensor: torch.Tensor) -> int:
        """Autograd saves a tensor in a unit's forward. Returns a number for used(), the same for
        every view of one storage. Call while `recording`, and not for a recomputation."""
        return NOT_RECORDED

    def used(self, number: int) -> None:
        """A backward reads what saved() gave this number."""
