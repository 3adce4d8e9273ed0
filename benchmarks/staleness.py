"""What forwards saw under LockFree, from a session's counters: how old parameters were, and whether
a forward waited for an update without having to.

watch = Staleness(bound=2)
watch.start(session.stats())
...                                   # a step
watch.note(session.stats())
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Element by element; what was not there before counts as 0."""
    return [n - (before[i] if i < len(before) else 0) for i, n in enumerate(now)]


class Staleness:
    """Counts over the steps noted so far, of all units together.

    Parameters grow older by a step at a time. So a forward need not wait for an update where the
    same unit's last forward saw parameters less than `bound` steps old: they are then at most
    `bound` steps old now, which is allowed. Such a wait is early.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.ages: Counter[int] = Counter()  # forwards, by steps that parameters lagged
        self.waits = 0  # forwards that waited for an update
        self.early_waits = 0
        self.merged = 0  # gradients of chunks that were added to older ones
        self._before: Mapping[str, Any] = {}
        self._oldest: list[int] = []  # by unit: in its last forwards; `bound` where unknown

    @property
    def forwards(self) -> int:
        """Of units."""
        return self.ages.total()

    @property
    def mean(self) -> float:
        """Steps that parameters lagged behind."""
        return sum(age * count for age, count in self.ages.items()) / max(1, self.forwards)

    def start(self, stats: Mapping[str, Any]) -> None:
        """Counts from here on."""
        self._before = stats
        self._oldest = [self.bound] * len(stats["staleness"])

    def note(self, stats: Mapping[str, Any]) -> None:
        """Counts what happened since the last call. REQUIRES: start()."""
        before, self._before = self._before, stats
        waits = differences(stats["update waits"], before["update waits"])
        self.merged += sum(differences(stats["merged gradients"], before["merged gradients"]))
        for unit, waited in enumerate(waits):
            self.waits += waited
            if self._oldest[unit] < self.bound:
                self.early_waits += waited
            seen = differences(stats["staleness"][unit], before["staleness"][unit])
            self.ages.update({age: count for age, count in enumerate(seen) if count})
            self._oldest[unit] = max((age for age, n in enumerate(seen) if n), default=self.bound)

    def histogram(self) -> list[int]:
        """Forwards by steps that parameters lagged, from 0 on."""
        return [self.ages[age] for age in range(max(self.ages, default=0) + 1)]
