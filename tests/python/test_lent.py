"""Gradients that are used where autograd left them: only where nobody else can write there, and
they are given back when they have been used."""

import gc
import weakref
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same
from strata._hooks.land_hook import owns_memory
from torch import nn
from torch.optim import SGD

ROOMY = {"device": "64MiB", "host": "256MiB"}
SHARED = torch.zeros(64, 64)  # what a custom backward returns, and writes again


class Returned(torch.autograd.Function):
    """x @ w, whose backward returns a view of memory that it keeps, or one of numpy's."""

    numpy = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        SHARED.copy_(x.T @ grads[0])
        if Returned.numpy:
            return None, torch.from_numpy(SHARED.numpy())
        return None, SHARED.view(64, 64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Returned.apply(x, self.w)
        return out


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        SHARED.fill_(1e6)  # whoever still reads it reads this
        optimizer.step()
        SHARED.fill_(1e6)
        optimizer.zero_grad()


@pytest.mark.parametrize("numpy", [False, True])
def test_a_gradient_in_memory_of_others_is_copied(
    numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch is given copies: it would read what was written behind the backward."""
    monkeypatch.setattr(Returned, "numpy", numpy)
    plain = built()
    plain[0].w.register_hook(torch.clone)
    train(plain, SGD(plain.parameters(), lr=0.1))
    inner = built()
    model, optimizer = strata.wrap(
        inner, SGD(inner.parameters(), lr=0.1), memory=ROOMY, activations=None
    )
    train(model, optimizer)
    assert_same(model, plain, 1e-6)


@pytest.mark.parametrize("update", ["on_step", "in_backward"])
def test_lent_gradients_come_back(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the update and another call nothing of them is left."""
    from strata._hooks import land_hook

    lent: list[weakref.ref[torch.Tensor]] = []

    def noted(grad: torch.Tensor, owns: Any = land_hook.owns_memory) -> bool:
        assert owns(grad)
        lent.append(weakref.ref(grad))
        return True

    monkeypatch.setattr(land_hook, "owns_memory", noted)
    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = strata.wrap(
        inner, SGD(inner.parameters(), lr=0.1), memory=ROOMY, update=update, activations=None
    )
    model(torch.randn(8, 64)).square().mean().backward()
    gc.collect()
    if update == "on_step":  # the update has not begun
        assert all(grad() is not None for grad in lent)
    optimizer.step()
    strata.synchronize(model)
    model(torch.randn(8, 64))
    gc.collect()
    assert len(lent) == 4
    assert all(grad() is None for grad in lent)


def test_who_keeps_the_memory_is_noticed() -> None:
    """A tensor, an array, or PyTorch's own object for the memory."""
    assert owns_memory(torch.zeros(64))
    for keep in (torch.Tensor.detach, torch.Tensor.numpy, torch.Tensor.untyped_storage):
        tensor = torch.zeros(64)
        kept = keep(tensor)
        assert not owns_memory(tensor)
        del kept
    assert not owns_memory(torch.zeros(64)[:32])
