"""What a wrapped module costs when its parameters are on the device already."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .common import MIB, Context, Figure, seconds_of
from .sides import session_of

TARGET_MICROSECONDS = 50.0


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
