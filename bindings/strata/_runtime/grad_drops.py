"""Gradients that are dropped one by one, as `model.zero_grad()` does. Ranks meet once for all of
them, ahead of whatever lands or is used next.

    drops.add(index)      # p.grad = None
    drops.settle()        # ahead of the next gradient, step or snapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .wrapped import Wrapped


class GradientDrops:
    """Of one wrapped model. Empty where no other rank trains it.

    Invariant: all ranks have added up what has landed ahead of the first one.
    """

    def __init__(self, state: Wrapped) -> None:
        self._state = state
        self._indices: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self._indices

    def add(self, index: int) -> None:
        """Whatever the core has of the gradient is dropped; of ranks, also where this one has
        none."""
        if not self._indices:
            self._state.steps.look_at_gradients()
        if not self._state.gradients.has_landed(index):
            return
        if self._state.ranks is not None:
            self._indices.add(index)
        else:
            self._state.session.drop_gradients_of([index])

    def settle(self) -> None:
        """All ranks come here. Raises StrataError (config) where another drops others."""
        if not self._indices:
            return
        self._state.landings.wait()
        self._state.session.drop_gradients_of(sorted(self._indices))
        self._indices.clear()

    def forget(self) -> None:
        """All gradients were dropped."""
        self._indices.clear()
