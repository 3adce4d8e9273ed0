"""SSD bandwidth of a step that computes little: 128 tokens, the optimizer state on the SSD; against
what fio gets from the same disk in the same run, the two taking turns.
"""

import statistics
from collections.abc import Iterator

import torch

from .common import GIB, MIB, Context, Figure, seconds_of
from .disk import mixed_bandwidth
from .models import llama, llama_166m, llama_config, tokens
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
    """Yields both bandwidths and the median of their ratio."""
    quick = context.quick
    model = (
        llama(llama_config(256, 4), torch.bfloat16, context.seed)
        if quick
        else llama_166m(context.seed)
    )
    parameters = sum(p.numel() for p in model.parameters()) * (4 if quick else 1)
    ours, theirs, moved = [], [], 0.0
    with context.scratch() as folder:
        budgets = state_on_ssd(parameters)
        if quick:
            budgets["host"] = 32 * MIB
        side = Paged(model, tokens(TOKENS, context.seed), budgets, folder)
        try:
            side.step()
            for turn in range(context.rounds):
                side.synchronize()
                file_bytes = 64 * MIB if quick else 2 * GIB
                theirs.append(mixed_bandwidth(folder, file_bytes, 1 if quick else FIO_SECONDS))
                value, moved = bandwidth(side, STEPS)
                ours.append(value)
                context.say(f"round {turn + 1}: {value / 1e6:.0f} MB/s, fio {theirs[-1] / 1e6:.0f}")
        finally:
            side.close()
    of_fio = statistics.median(100 * a / b for a, b in zip(ours, theirs, strict=True))
    fio = statistics.median(theirs) / 1e6
    yield Figure("io-bound", "fio_bandwidth", fio, "MB/s", better="higher")
    yield Figure("io-bound", "bytes_per_step", moved / 1e6, "MB")
    mean = statistics.median(ours) / 1e6
    yield Figure("io-bound", "bandwidth", mean, "MB/s", better="higher")
    yield Figure("io-bound", "of_fio", of_fio, "%", target=90, better="higher")
