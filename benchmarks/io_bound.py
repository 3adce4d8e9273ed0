"""SSD bandwidth of a step that computes little: 128 tokens, the optimizer state on the SSD; against
what the same disk can do at that time. The disk is shared, so fio runs before and behind every
round, and the bound of a round is the most that the disk gave to any of the three.
"""

import statistics
from collections.abc import Iterator

from .common import GIB, MIB, Context, Figure, seconds_of, share_of_best
from .disk import mixed_bandwidth
from .models import llama_166m_or_small, tokens
from .sides import Paged, state_on_ssd

TOKENS = 128
STEPS = 3
FIO_SECONDS = 10


def ssd_bytes(side: Paged) -> int:
    """Bytes read from and written to the SSD since the start."""
    stats = side.session.stats()
    return int(stats["ssd to host bytes"] + stats["host to ssd bytes"])


def bandwidth(side: Paged, steps: int) -> tuple[float, float]:
    """(bytes per second, bytes per step) of steps in a row, the last one waited for."""
    before = ssd_bytes(side)

    def work() -> None:
        for _ in range(steps):
            side.step()
        side.synchronize()

    seconds = seconds_of(work)
    moved = ssd_bytes(side) - before
    return moved / seconds, moved / steps


def run(context: Context) -> Iterator[Figure]:
    """Yields both bandwidths and the median of what each round reached of its bound."""
    quick = context.quick
    model = llama_166m_or_small(quick, context.seed, (256, 4))
    parameters = sum(p.numel() for p in model.parameters()) * (4 if quick else 1)
    ours, theirs, moved = [], [], 0.0
    with context.scratch() as folder:
        budgets = state_on_ssd(parameters)
        if quick:
            budgets["host"] = 32 * MIB

        def fio() -> float:
            side.synchronize()
            file_bytes = 64 * MIB if quick else 2 * GIB
            return mixed_bandwidth(folder, file_bytes, 1 if quick else FIO_SECONDS)

        side = Paged(model, tokens(TOKENS, context.seed), budgets, folder)
        try:
            side.step()
            theirs.append(fio())
            for turn in range(context.rounds):
                value, moved = bandwidth(side, STEPS)
                ours.append(value)
                theirs.append(fio())
                context.say(f"round {turn + 1}: {value / 1e6:.0f} MB/s, fio {theirs[-1] / 1e6:.0f}")
        finally:
            side.close()
    of_bound = share_of_best(ours, theirs[:-1], theirs[1:])
    alone = statistics.median(theirs) / 1e6
    yield Figure("io-bound", "fio_bandwidth", alone, "MB/s", better="higher")
    yield Figure("io-bound", "bytes_per_step", moved / 1e6, "MB")
    mean = statistics.median(ours) / 1e6
    yield Figure("io-bound", "bandwidth", mean, "MB/s", better="higher")
    yield Figure("io-bound", "of_bound", of_bound, "%", 90, 100, "higher")
