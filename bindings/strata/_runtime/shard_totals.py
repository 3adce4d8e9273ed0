"""Squares of gradients whose shards are with other processes: of the whole, which all of them ask
for at the same moment.

    totals = ShardTotals(state, own)        # own(index): of this process's shard
    totals.of(index)                        # the sum of squares, and whether it was scaled since
    totals.of_all()                         # of all gradients together, as step() has them
    totals.forget(index)                    # it changes, or may have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .wrapped import Wrapped

Squares = tuple[float, bool]  # the sum, and whether the gradient was scaled and not rounded since


class ShardTotals:
    """Of one wrapped model. Those that are not known are found for all shards at once."""

    def __init__(self, state: Wrapped, own: Callable[[int], Squares]) -> None:
        """`own`: nothing where there is no gradient."""
        self._state, self._own = state, own
        self._known: dict[int, Squares] = {}

    def of(self, index: int) -> Squares:
        """Of the whole. REQUIRES: it is a shard."""
        if index not in self._known:
            self._learn()
        return self._known[index]

    def _learn(self) -> None:
        shards = self._state.shards
        assert shards is not None
        found = {index: self._own(index) for index in shards.shardings}
        squares = [found.get(i, (0.0, False))[0] for i in range(len(self._state.params))]
        totals = shards.add_up(squares)
        self._known = {i: (totals[i], scaled) for i, (_, scaled) in found.items()}

    def forget(self, index: int) -> None:
        """It is asked for anew."""
        self._known.pop(index, None)

    def forget_all(self) -> None:
        """All are."""
        self._known.clear()

    def of_all(self) -> float | None:
        """None: those of the core count. All processes that have shards of the model ask.
        REQUIRES: Gradients.hand_over()."""
        state = self._state
        if state.shards is None or state.config["update"] != "on_step":
            return None
        state.landings.wait()
        state.steps.look_at_gradients(wanted=True)
        count, squares = state.session.gradient_count, state.session.gradient_squares
        own = [squares(i)[0] if count(i) else 0.0 for i in range(len(state.params))]
        return state.shards.agreed(sum(state.shards.add_up(own)))
