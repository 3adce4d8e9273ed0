"""Step time where everything fits, with a quarter of the parameters on the device, and with the
optimizer state on the SSD. All sides take turns in one process.

Of 2,048 tokens: over plain PyTorch. Of 128, where little is computed: over plain PyTorch's forward
and backward with one pass of our kernel over the bytes of an update, as if that were all.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from .common import Context, Figure, median_ratio, take_turns
from .models import llama_166m_or_small, tokens
from .sides import (
    OnePass,
    Paged,
    Plain,
    Side,
    everything_resident,
    quarter_device,
    state_on_ssd,
    steady_step,
)

TOKENS, FEW_TOKENS = 2048, 128
TARGETS = {"resident": 1.03, "host_state": 1.05, "ssd_state": 1.10}
FEW_TARGETS = {"resident": 1.08, "host_state": 1.15}


def run(context: Context) -> Iterator[Figure]:
    """Yields the ratio of each side's step to the yardstick's, and every side's seconds."""
    with context.scratch() as folder:
        many = _sides(context, 64 if context.quick else TOKENS, folder)
        yield from _ratios(context, many, "plain", TARGETS)
    few = _sides(context, 32 if context.quick else FEW_TOKENS, None)
    yield from _ratios(context, few, "one_pass", FEW_TARGETS, f"_at_{FEW_TOKENS}")


def _sides(context: Context, token_count: int, folder: Path | None) -> dict[str, Side]:
    def model() -> torch.nn.Module:
        return llama_166m_or_small(context.quick, context.seed)

    batch = tokens(token_count, context.seed)
    parameters = sum(p.numel() for p in model().parameters())
    room = parameters * 4 if context.quick else parameters  # a quarter holds the embedding then
    sides: dict[str, Side] = {
        "resident": Paged(model(), batch, everything_resident(room)),
        "host_state": Paged(model(), batch, quarter_device(room)),
    }
    if folder is None:
        sides["one_pass"] = OnePass(model(), batch)
    else:
        sides["plain"] = Plain(model(), batch)
        sides["ssd_state"] = Paged(model(), batch, state_on_ssd(room), folder)
    return sides


def _ratios(
    context: Context,
    sides: dict[str, Side],
    yardstick: str,
    targets: dict[str, float],
    of: str = "",
) -> Iterator[Figure]:
    try:
        for side in sides.values():
            side.step()  # the first step records, allocates and compiles
        turns = {name: partial(steady_step, side) for name, side in sides.items()}
        taken = take_turns(turns, context.rounds, context.say)
    finally:
        for side in sides.values():
            side.close()
    for name, values in taken.items():
        yield Figure("step", f"{name}{of}_seconds", statistics.median(values), "s")
    for name, target in targets.items():
        ratio = median_ratio(taken[name], taken[yardstick])
        # An update may hide behind the forward, so one pass is no bound.
        bound = 1.0 if yardstick == "plain" else None
        yield Figure("step", f"{name}_over_{yardstick}{of}", ratio, "ratio", target, bound=bound)
