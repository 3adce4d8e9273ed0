"""A small model, plain and wrapped, whose gradients are looked at and changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import strata
import torch
from strata._runtime.wrapped import wrapped
from torch import nn
from variants import thorough

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIERS = ("device", thorough("host"), "ssd")
WIDE = 48


class Net(nn.Module):
    """Three blocks, a parameter that no forward uses, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDE, WIDE)) for _ in range(3)])
        self.unused = nn.Parameter(torch.ones(5))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x * self.gain).float().square().sum()


def plain_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """In float32 strata's is torch's, bit for bit: it multiplies and adds once."""
    return torch.optim.SGD(model.parameters(), lr=0.125)


def wrapped_net(tier: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    model = plain_net(dtype)
    memory: dict[str, Any] = {"device": "16MiB", "host": "64MiB"}
    if tier == "ssd":
        memory = {"device": "16MiB", "host": "384KiB", "ssd": "64MiB"}
        more["ssd_path"] = folder
    more = {"activations": None, "page_size": "64KiB", **more}
    model, optimizer = strata.wrap(model, sgd(model), memory=memory, **more)
    state = wrapped(model)
    if tier == "device":
        state.session.adopt(on_device=[True] * len(state.units))
    assert {unit["grad_tier"] for unit in state.session.plan["units"]} == {tier}
    return model, optimizer


def backward(model: nn.Module, seed: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).backward()


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert mine.grad.dtype == theirs.grad.dtype
            assert mine.grad.shape == theirs.grad.shape
            assert torch.equal(mine.grad.clone(), theirs.grad), name


def both(change: Callable[[nn.Module], Any], model: nn.Module, plain: nn.Module) -> Any:
    """Does it to both. Returns what it returned."""
    found, expected = change(model), change(plain)
    same_gradients(model, plain)
    return found, expected


def grads(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def weight(model: Any) -> Any:
    return model.blocks[1][0].weight
