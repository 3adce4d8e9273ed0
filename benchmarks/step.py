"""Step time against plain PyTorch: where everything fits, with a quarter of the parameters on the
device, and with the optimizer state on the SSD. The four sides take turns in one process.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from .common import Context, Figure, median_ratio, take_turns
from .models import llama, llama_166m, llama_config, tokens
from .sides import (
    Paged,
    Plain,
    Side,
    everything_resident,
    quarter_device,
    state_on_ssd,
    steady_step,
)

TOKENS = 2048
TARGETS = {"resident": 1.03, "host_state": 1.05, "ssd_state": 1.10}


def run(context: Context) -> Iterator[Figure]:
    """Yields the ratio of each side's step to plain PyTorch's, and every side's seconds."""

    def model() -> torch.nn.Module:
        if context.quick:
            return llama(llama_config(128, 2), torch.bfloat16, context.seed)
        return llama_166m(context.seed)

    batch = tokens(64 if context.quick else TOKENS, context.seed)
    parameters = sum(p.numel() for p in model().parameters())
    if context.quick:  # a quarter of so small a model is less than its embedding
        parameters *= 4
    with context.scratch() as folder:
        sides: dict[str, Side] = {
            "plain": Plain(model(), batch),
            "resident": Paged(model(), batch, everything_resident(parameters)),
            "host_state": Paged(model(), batch, quarter_device(parameters)),
            "ssd_state": Paged(model(), batch, state_on_ssd(parameters), folder),
        }
        try:
            for side in sides.values():
                side.step()  # the first step records, allocates and compiles
            turns = {name: partial(steady_step, side) for name, side in sides.items()}
            taken = take_turns(turns, context.rounds, context.say)
        finally:
            for side in sides.values():
                side.close()
    for name, values in taken.items():
        yield Figure("step", f"{name}_seconds", statistics.median(values), "s")
    for name, target in TARGETS.items():
        ratio = median_ratio(taken[name], taken["plain"])
        yield Figure("step", f"{name}_over_plain", ratio, "ratio", target, bound=1.0)
