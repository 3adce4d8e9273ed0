"""Parameter bytes that cross to the device in a step, as the batch grows from 1 to 16 slices."""

from collections.abc import Iterator

import torch

from .common import Context, Figure
from .models import llama, llama_config, tokens
from .planned import UNDER_WAY, Planned, uploaded_bytes
from .sides import MIB, quarter_device

SLICES = (1, 2, 4, 8, 16)
SEQUENCE = 128
STEPS = 3


def run(context: Context) -> Iterator[Figure]:
    """Yields the bytes of each batch, and the largest over the smallest."""
    hidden, layers = (128, 2) if context.quick else (512, 8)
    moved: list[float] = []
    for slices in SLICES:
        model = llama(llama_config(hidden, layers), torch.bfloat16, context.seed)
        parameters = sum(p.numel() for p in model.parameters())
        memory = quarter_device(parameters)
        memory["device"] += slices * 48 * MIB  # logits and their gradients, in float32 too
        memory["host"] += slices * 64 * MIB
        batch = tokens(slices * SEQUENCE, context.seed, sequences=slices)
        side = Planned(model, batch, memory, None, "recompute", slices if slices > 1 else None)
        try:
            side.settle()
            side.session.adopt(param_bytes=parameters // 2)  # a quarter of them, whatever the batch
            for _ in range(UNDER_WAY):
                side.step()
            before = uploaded_bytes(side)
            for _ in range(STEPS):
                side.step()
            moved.append((uploaded_bytes(side) - before) / STEPS)
        finally:
            side.close()
        yield Figure(
            "batch", f"slices{slices}_upload_bytes", moved[-1], "B", None, 4.0 * parameters
        )
    yield Figure("batch", "most_over_least", max(moved) / min(moved), "ratio")
    yield Figure("batch", "slices16_over_1", moved[-1] / moved[0], "ratio", 1.0, 1.0)
