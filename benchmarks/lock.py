"""How long the core's lock is held in steady steps: nothing that grows with bytes is done under it.

A Llama whose states rest on the SSD, and whose batch is small, so that pages, checksums and updates
never pause.
"""

import statistics
import time
from collections.abc import Iterator

from .common import Context, Figure
from .models import llama_166m_or_small, tokens
from .sides import Paged, state_on_ssd

TOKENS = 128
STEPS = 10
LONGEST_TARGET_S = 50e-6


def run(context: Context) -> Iterator[Figure]:
    """Yields the longest hold and the sum of a step in processor time, beside the longest that
    the same clock shows where nothing is done, and wall-clock p99."""
    model = llama_166m_or_small(context.quick, context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    longest, summed, wall, nothing = [], [], [], []
    with context.scratch() as folder:
        side = Paged(model, tokens(TOKENS, context.seed), state_on_ssd(parameters), folder)
        try:
            for _ in range(4):
                side.step()  # records, plans and settles
            side.session.lock_holds()
            for _ in range(context.rounds):
                for _ in range(STEPS):
                    side.step()
                holds = side.session.lock_holds()
                longest.append(holds["longest_s"])
                summed.append(holds["sum_s"] / STEPS)
                wall.append(statistics.quantiles(holds["wall_ns"], n=100)[-1] * 1e-9)
                nothing.append(_longest_of_nothing(holds["holds"]))
        finally:
            side.close()
    yield Figure(
        "lock", "longest_hold", statistics.median(longest), "s of the holder", LONGEST_TARGET_S
    )
    yield Figure("lock", "longest_of_nothing", statistics.median(nothing), "s of the holder")
    yield Figure("lock", "holds_of_a_step", statistics.median(summed), "s of the holder")
    yield Figure("lock", "wall_p99", statistics.median(wall), "s")


def _longest_of_nothing(count: int) -> float:
    """What the clock of the processor's time says of `count` spans in which nothing is done, at
    most: interrupts are in it. No hold can be shown to be shorter."""
    spans = (time.thread_time_ns() - time.thread_time_ns() for _ in range(count))
    return -min(spans) * 1e-9
