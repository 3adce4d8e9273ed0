"""Gradients of slices are added in float32, whatever the backward does, and no graph stays."""

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import build
from stacks import Blocks
from test_slices import sliced
from torch import nn


def gradient_of(model: nn.Module, name: str) -> torch.Tensor:
    """Of one step over 32 rows whose gradients are of one size."""
    torch.manual_seed(3)
    rows = torch.randn(32, 48).to(next(model.parameters()).dtype)
    model(rows).square().sum().backward()
    return strata.gather_grad(dict(model.named_parameters())[name]).double()


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_gradients_of_slices_are_added_in_float32(core: ModuleType) -> None:
    """One more rounding than the whole batch, not one for each slice."""
    name = "blocks.1.0.weight"
    exact = build(Blocks).bfloat16().double()
    torch.manual_seed(3)
    rows = torch.randn(32, 48).bfloat16().double()
    exact(rows).square().sum().backward()
    wanted = dict(exact.named_parameters())[name].grad
    assert wanted is not None
    errors = []
    for count in (1, 32):
        model, _ = sliced(lambda: Blocks().bfloat16(), count)
        errors.append(float((gradient_of(model, name) - wanted).norm() / wanted.norm()))
        strata.unwrap(model)
    assert errors[1] < 1.1 * errors[0]


class Halves(nn.Module):
    """One parameter, whose gradient another function may keep to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + Kept.apply(x, self.weight)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def halves() -> Blocks:
    model = Blocks(count=2)
    model.blocks.append(Halves())
    return model.bfloat16()


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_sums_of_slices_whatever_backward_does(core: ModuleType) -> None:
    """Backwards that raise, are repeated, begin within the unit, or leave gradients out."""
    rows = torch.randn(12, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradients = []
    for count in (1, 4):
        model, optimizer = sliced(halves, count)
        given: list[torch.Tensor] = []

        def keep(module: nn.Module, args: Any, out: Any, g: Any = given) -> None:
            g += [out] if out.requires_grad else []  # not of the trial

        handle = model.blocks[1][0].register_forward_hook(keep)
        out = model(rows)
        handle.remove()
        loss = out.float().square().sum() + 0.1 * sum(g.float().square().sum() for g in given)

        def fail(grad: torch.Tensor) -> None:
            raise ArithmeticError

        failing = given[0].register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.backward(retain_graph=True)
        failing.remove()
        optimizer.zero_grad()
        loss.backward()
        names = [n for n, _ in model.named_parameters()]
        parameters = dict(model.named_parameters())
        gradients.append([strata.gather_grad(parameters[n]).float() for n in names])
        strata.unwrap(model)
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 0.01 * one.norm()


@pytest.mark.parametrize("core", ["real"], indirect=True)
def test_a_sliced_graph_that_is_dropped_is_freed(core: ModuleType) -> None:
    model, _ = sliced(lambda: Blocks().bfloat16(), 3)
    rows = torch.randn(32, 48).bfloat16().requires_grad_()
    kept = weakref.ref(rows)
    gc.collect()
    gc.disable()
    try:
        model(rows)
        del rows
        assert kept() is None
    finally:
        gc.enable()
