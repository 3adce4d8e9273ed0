"""What it costs to clip gradients of a wrapped model by their norm, as PyTorch does it, and to look
at them: `clip_grad_norm_` reads sums that were taken while they landed, and moves no page.

The gradients rest on the SSD, where reading them would be slowest.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn.utils import clip_grad_norm_

from .common import Context, Figure, seconds_of
from .models import llama_166m_or_small, tokens
from .sides import Paged, state_on_ssd

TARGET_S = 5e-3
TOKENS = 128


def moved(session: Any) -> int:
    """Bytes that have crossed any link so far."""
    links = ("ssd to host", "host to ssd", "host to device", "device to host")
    stats = session.stats()
    return sum(stats[f"{link} bytes"] for link in links)


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of clip_grad_norm_, of zero_grad(), and bytes that moved meanwhile."""
    model = llama_166m_or_small(context.quick, context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    clipping, zeroing, bytes_moved = [], [], 0
    with context.scratch() as folder:
        side = Paged(model, tokens(TOKENS, context.seed), state_on_ssd(parameters), folder)
        try:
            for _ in range(max(2, context.rounds)):
                side.model(input_ids=side.batch, labels=side.batch).loss.backward()
                side.session.synchronize()
                before = moved(side.session)
                # Each gradient is scaled.
                clip = partial(clip_grad_norm_, side.model.parameters(), 1e-3)
                clipping.append(seconds_of(clip))
                bytes_moved += moved(side.session) - before
                side.optimizer.step()
                zeroing.append(seconds_of(side.model.zero_grad))
        finally:
            side.close()
    yield Figure("grad", "clip_grad_norm", statistics.median(clipping), "s", TARGET_S)
    yield Figure("grad", "bytes_moved", bytes_moved, "B", 0)
    yield Figure("grad", "model_zero_grad", statistics.median(zeroing), "s")
