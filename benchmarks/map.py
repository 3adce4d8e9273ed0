"""What it costs to let the pages of a view show other frames, all at once as when a plan is made,
against copying them; and how often a step does so once all is in place: never.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import device_program
from .common import Context, Figure
from .device import torch_device
from .models import llama, llama_config, tokens
from .planned import UNDER_WAY
from .sides import Paged, everything_resident, quarter_device

STEPS = 5


def mapping_calls(stats: Mapping[str, Any]) -> int:
    """Pages that views were made to show; on a GPU also what its driver was asked for."""
    driver = stats["driver"]
    return int(stats["mappings"]) + sum(driver.get(n, 0) for n in ("map", "unmap", "set_access"))


def steady_mappings(context: Context) -> int:
    """Mapping calls of some steps of a model whose parameters take turns on the device."""
    hidden, layers, count = (128, 8, 128) if context.quick else (1024, 12, 2048)
    config = llama_config(hidden, layers)
    model = llama(config, torch.bfloat16, context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    memory = everything_resident(parameters) if context.quick else quarter_device(parameters)
    batch = tokens(count, context.seed).to(torch_device(context.device))
    side = Paged(model, batch, memory, options={"device": context.device})
    try:
        for _ in range(UNDER_WAY):
            side.step()
        before = mapping_calls(side.session.stats())
        for _ in range(STEPS):
            side.step()
        return mapping_calls(side.session.stats()) - before
    finally:
        side.close()


def run(context: Context) -> Iterator[Figure]:
    """Yields microseconds of a mapping and of a page's copy, and the mappings of steady steps."""
    yield from device_program.figures(context, "map")
    yield Figure("map", "mappings_in_steady_steps", steady_mappings(context), "calls", 0, 0)
