"""What a wrapped module costs when its parameters are on the device already; and what it costs to
clip gradients by their norm, which rest on the SSD, where reading them would be slowest:
`clip_grad_norm_` reads sums that were taken while they landed, and moves no page.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from .common import MIB, Context, Figure, seconds_of
from .models import llama_166m_or_small, tokens
from .sides import Paged, session_of, state_on_ssd

TARGET_MICROSECONDS = 50.0
CLIPPING_TARGET_S = 5e-3
TOKENS = 128
LINKS = ("ssd to host", "host to ssd", "host to device", "device to host")


class Idle(nn.Module):
    """A unit that owns a parameter and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its input."""
        return x


class Model(nn.Module):
    """Blocks to be found as units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Idle() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the blocks."""
        for layer in self.layers:
            x = layer(x)
        return x


def microseconds(work: Callable[[], Any], calls: int, rounds: int) -> float:
    """Median time of one call."""

    def loop() -> None:
        for _ in range(calls):
            work()

    loop()
    return statistics.median(seconds_of(loop) for _ in range(rounds)) / calls * 1e6


def run(context: Context) -> Iterator[Figure]:
    """Yields microseconds of enter+leave in the core, and of a module call with hooks."""
    import strata

    calls, rounds = (100, 1) if context.quick else (10_000, context.rounds)
    bare = Model()
    model: nn.Module = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    memory = {"device": 8 * MIB, "host": 8 * MIB}
    model, _ = strata.wrap(model, optimizer, memory=memory, activations=None, device="host")
    session = session_of(model)
    try:

        def pair() -> None:
            session.enter(0, False)
            session.leave(0)

        core = microseconds(pair, calls, rounds)
        x = torch.ones(1)
        with torch.no_grad():
            model(x)
            wrapped = microseconds(lambda: model(x), calls, rounds)
            plain = microseconds(lambda: bare(x), calls, rounds)
    finally:
        session.close()
    yield Figure("wrap", "enter_leave", core, "µs", TARGET_MICROSECONDS)
    units = len(bare.layers)
    yield Figure("wrap", "module_call", (wrapped - plain) / units, "µs", TARGET_MICROSECONDS)
    yield from _clipping(context)


def _clipping(context: Context) -> Iterator[Figure]:
    """Seconds of clip_grad_norm_ and of zero_grad(), and bytes that clipping moved."""
    model = llama_166m_or_small(context.quick, context.seed)
    budgets = state_on_ssd(sum(p.numel() for p in model.parameters()))
    clipping, zeroing, moved = [], [], 0
    with context.scratch() as folder:
        side = Paged(model, tokens(TOKENS, context.seed), budgets, folder)

        def crossed() -> int:
            stats = side.session.stats()
            return sum(int(stats[f"{link} bytes"]) for link in LINKS)

        try:
            for _ in range(max(2, context.rounds)):
                side.model(input_ids=side.batch, labels=side.batch).loss.backward()
                side.session.synchronize()
                before = crossed()
                # Each gradient is scaled.
                clip = partial(clip_grad_norm_, side.model.parameters(), 1e-3)
                clipping.append(seconds_of(clip))
                moved += crossed() - before
                side.optimizer.step()
                zeroing.append(seconds_of(side.model.zero_grad))
        finally:
            side.close()
    yield Figure("wrap", "clip_grad_norm", statistics.median(clipping), "s", CLIPPING_TARGET_S)
    yield Figure("wrap", "clipping_moved", moved, "B", 0)
    yield Figure("wrap", "model_zero_grad", statistics.median(zeroing), "s")
