"""Which units are computed again in the backward, and which turned out not to be able to.

second_runs = SecondRuns(state.units)
second_runs.refuse(unit, "its forward gives another output the second time")
for found in second_runs.take_refused(classes): ...     # plans to make anew, at the end of a step
second_runs.tell()                                      # the log names units that run again, once

Use from the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._config.choices import RECOMPUTES
from .._errors import listed

if TYPE_CHECKING:
    from .._runtime.unit import Unit
    from .shape_class import ShapeClass

log = logging.getLogger("strata")


class SecondRuns:
    """Of the units of one model."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._refused: dict[str, list[str]] = {}  # names of units to tell of, by the reason
        self._told: set[str] = set()

    def refuse(self, unit: Unit, reason: str) -> None:
        """The unit keeps its activations from now on, or they are swapped."""
        unit.may_recompute, unit.activation, unit.slices = False, "keep", 1
        self._refused.setdefault(reason, []).append(unit.name)

    def take_refused(self, classes: Sequence[ShapeClass]) -> list[ShapeClass]:
        """Says which units were refused since the last call. Returns the classes of batches whose
        plans are to be made anew because of them."""
        if not self._refused:
            return []
        refused, self._refused = self._refused, {}
        for reason, names in refused.items():
            log.warning("not computed again in the backward: %s: %s", listed(names), reason)
        for found in classes:
            if found.trace is not None:
                for unit, traced in zip(self._units, found.trace.units, strict=True):
                    traced.may_recompute = unit.may_recompute
        return [found for found in classes if found.paper is not None]

    def tell(self) -> None:
        """Says once which units are computed again."""
        names = [unit.name for unit in self._units if unit.activation in RECOMPUTES]
        if not self._told.issuperset(names):
            self._told.update(names)
            log.info(
                "computed again in the backward, for their activations take memory: %s",
                listed(names),
            )
