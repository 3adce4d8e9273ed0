"""Wrapped models whose units are computed again, and what they are compared with."""

from collections.abc import Callable
from typing import Any

import torch
from small_models import assert_same, build, tight
from stacks import Blocks, steps
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn import functional as F

Loop = Callable[..., list[float]]


def recompute(model: nn.Module, slices: int = 1) -> nn.Module:
    """From now on every unit that can be is computed again."""
    units = [unit for unit in wrapped(model).units if unit.may_recompute]
    assert units
    for unit in units:
        unit.activation, unit.slices = "recompute", slices
    return model


def recomputed(make: Callable[[], nn.Module], slices: int = 1, **more: Any) -> tuple[Any, Any]:
    model, optimizer = tight(build(make), **more)
    return recompute(model, slices), optimizer


def compare(make: Callable[[], nn.Module], loop: Loop = steps, **more: Any) -> nn.Module:
    """Keeping and recomputing give the same bits; the recomputing model is returned."""
    kept, optimizer = tight(build(make), **more)
    expected = loop(kept, optimizer)
    model, optimizer = recomputed(make, **more)
    assert loop(model, optimizer) == expected
    assert_same(model, kept)
    return model


_runs: dict[int, int] = {}


class Counter:
    """Counts where nothing is put back: in a variable of this file."""

    def __init__(self) -> None:
        self.runs = 0

    @property
    def runs(self) -> int:
        return _runs.get(id(self), 0)  # a copy begins anew

    @runs.setter
    def runs(self, runs: int) -> None:
        _runs[id(self)] = runs


class Counted(nn.Module):
    """Counts all runs of its forward, trials and second runs too."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        vars(self)["counter"] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.runs += 1
        return x + F.gelu(self.inner(F.gelu(self.inner(x))))


def with_block(make_block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A stack in which one block is what the test is about."""

    def make() -> nn.Module:
        model = Blocks()
        model.blocks[2] = nn.Sequential(make_block())
        return model

    return make
