"""A stack of blocks, and one training loop run on it plain and wrapped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import (
    adamw,
    assert_same,
    build,
    tight,
)
from torch import nn


class Blocks(nn.Module):
    """A stack of blocks; what is done with them is up to the test."""

    def __init__(self, count: int = 4, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.head = nn.Linear(width, width)
        self.run: Callable[[Any, torch.Tensor], torch.Tensor] = Blocks.plain_run

    def plain_run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.run(self, self.embed(x)))
        return out


def steps(model: nn.Module, optimizer: Any, count: int = 3, backwards: int = 1) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(count):
        for _ in range(backwards):
            loss = model(torch.randn(3, 48)).square().mean() / backwards
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(
    make: Callable[[], nn.Module], loop: Callable[..., list[float]] = steps, rel: float = 1e-6
) -> nn.Module:
    """Runs the loop on a plain model and on a wrapped one; the wrapped one is returned."""
    plain = build(make)
    expected = loop(plain, adamw(plain))
    model, optimizer = tight(build(make))
    assert loop(model, optimizer) == pytest.approx(expected, rel=rel)
    assert_same(model, plain, 10 * rel)
    return model


def blocks(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Blocks()
        model.run = run
        return model

    return make
