"""Steps that compute little (128 tokens) with the optimizer state on the SSD, under LockFree of
more and more steps: how many a second, what they wait for, and how old parameters are. Beside them
the same steps under LockFree(4) with all state in host memory, which the SSD cannot hold up.

A forward waits early where its parameters could not have been too old: the same unit's forward one
step before saw them less than the bound behind, and they age by one step at a time. Merged are the
gradients, chunk by chunk, that were added to one that still waited.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from .common import MIB, Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama_166m_or_small, tokens
from .modes import lock_free
from .sides import Paged
from .staleness import Staleness

TOKENS = 128
BOUNDS = (0, 1, 2, 4)
WITHOUT_SSD = "without_ssd"
SHARE_MIN = 0.95  # of the steps without an SSD
# More than any bound: then as many updates end as begin, and gradients merge as they go on to.
STEPS_BEFORE = max(BOUNDS) + 2
STEPS = 12


class Watched:
    """A side, and what its timed steps waited for."""

    def __init__(self, side: Paged, bound: int, steps: tuple[int, int]) -> None:
        self.side = side
        self.staleness = Staleness(bound)
        self.stalls: defaultdict[str, list[float]] = defaultdict(list)  # by cause: seconds per step
        self.chunks = sum(unit["chunks"] for unit in side.session.plan["units"])
        self.steps_before, self.steps = steps
        self.turns = 0

    def turn(self) -> float:
        """Seconds per step of steps in a row. Updates run on behind them, and into them from
        before, as in the middle of a run."""
        for _ in range(self.steps_before):
            self.side.step()
        self.staleness.start(self.side.session.stats())
        seconds = seconds_of(self._steps)
        self.turns += 1
        self._note_stalls()
        self.side.synchronize()
        return seconds / self.steps

    def _steps(self) -> None:
        for _ in range(self.steps):
            self.side.step()
            self.staleness.note(self.side.session.stats())

    def _note_stalls(self) -> None:
        import strata

        for cause, units in strata.report(self.side.model).stalls.items():
            self.stalls[cause].append(sum(units.values()))

    def figures(self, name: str) -> Iterator[Figure]:
        """What the steps waited for and saw."""
        staleness = self.staleness
        for cause, seconds in self.stalls.items():
            mean = sum(seconds) / self.turns
            yield Figure("ssd-bound", f"{name}_waits_for_{cause}", mean, "s/step")
        forwards = max(1, staleness.forwards)
        gradients = self.chunks * self.steps * self.turns
        yield Figure("ssd-bound", f"{name}_merged", 100 * staleness.merged / gradients, "%")
        waited = 100 * staleness.waits / forwards
        yield Figure("ssd-bound", f"{name}_forwards_that_waited", waited, "%")
        early = 100 * staleness.early_waits / forwards
        yield Figure("ssd-bound", f"{name}_forwards_that_waited_early", early, "%", target=0)
        for age, count in enumerate(staleness.histogram()):
            share = 100 * count / forwards
            yield Figure("ssd-bound", f"{name}_forwards_{age}_steps_behind", share, "%")


def open_sides(context: Context, folder: Path, sides: dict[str, Watched]) -> None:
    """Fills in a side for every bound, and the one without an SSD."""

    def model() -> torch.nn.Module:
        return llama_166m_or_small(context.quick, context.seed, (256, 4))

    batch = tokens(TOKENS, context.seed)
    parameters = sum(p.numel() for p in model().parameters())
    passing = 16 * MIB if context.quick else None
    steps = (1, 2) if context.quick else (STEPS_BEFORE, STEPS)
    for bound in BOUNDS:
        mode = lock_free(bound)
        budgets = mode.state_on_ssd(parameters, passing)
        side = Paged(model(), batch, budgets, folder, mode.options())
        sides[mode.name] = Watched(side, bound, steps)
    mode = lock_free(max(BOUNDS))
    side = Paged(model(), batch, mode.state_in_host(parameters), None, mode.options())
    sides[WITHOUT_SSD] = Watched(side, max(BOUNDS), steps)


def run(context: Context) -> Iterator[Figure]:
    """Yields every side's steps per second and waits, and its share of those without an SSD."""
    sides: dict[str, Watched] = {}
    with context.scratch() as folder:
        try:
            open_sides(context, folder, sides)
            for watched in sides.values():
                watched.side.step()  # the first step records, allocates and compiles
            turns = {name: partial(Watched.turn, watched) for name, watched in sides.items()}
            taken = take_turns(turns, context.rounds, context.say)
        finally:
            for watched in sides.values():
                watched.side.close()
    for name, watched in sides.items():
        rate = 1 / statistics.median(taken[name])
        yield Figure("ssd-bound", f"{name}_steps_per_second", rate, "1/s", better="higher")
        yield from watched.figures(name)
    for bound in BOUNDS:
        name = lock_free(bound).name
        yield Figure(
            "ssd-bound",
            f"{name}_rate_over_{WITHOUT_SSD}",
            median_ratio(taken[WITHOUT_SSD], taken[name]),
            "ratio",
            SHARE_MIN if bound == max(BOUNDS) else None,
            bound=1.0,
            better="higher",
        )
