"""Forwards that change parameters in place: once for each call, whatever the plan says of them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import adamw, assert_same, build, tight
from stacks import Blocks
from strata._activations.arguments import Arguments
from strata._activations.trial import Verdicts
from strata._errors import StrataError
from strata._runtime.wrapped import wrapped
from torch import nn

Write = Callable[[torch.Tensor], object]


class Average(nn.Module):
    """A layer beside a parameter that follows its calls, as moving averages do."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        self.average = nn.Parameter(torch.full((48,), 2.0), requires_grad=False)
        self.write = write
        self.writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.write(self.average)
        out: torch.Tensor = torch.tanh(self.inner(x)) * self.average
        return out


def within(write: Write) -> Write:
    def run(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            write(parameter)

    return run


def of_graphs_only(parameter: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        with torch.no_grad():
            parameter.mul_(0.9)


WRITES: dict[str, Write] = {
    "in place": within(lambda p: p.mul_(0.9)),
    "by data": lambda p: p.data.mul_(0.9),
    "by detach": lambda p: p.detach().mul_(0.9),
    "where a graph is made": of_graphs_only,
}


class Shrinking(Average):
    """What it writes to is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.inner.weight)
        return torch.tanh(self.inner(x))


def with_average(write: Write, kind: type[Average] = Average) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Blocks()
        model.blocks[1] = nn.Sequential(kind(write))
        return model

    return make


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 48)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def roomy(make: Callable[[], nn.Module], **more: Any) -> tuple[Any, Any]:
    """Wrapped as users do; what is written without a word stays on the device."""
    return tight(build(make), memory={"device": "16MiB", "host": "64MiB"}, **more)


ASKED: list[dict[str, Any]] = [
    {"activations": "recompute", "split": 2},
    {"activations": "auto", "split": 2},
    {"activations": "auto"},
    {"activations": "recompute"},
    {"activations": "swap"},
    {"activations": "keep"},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_is_changed_once_in_each_forward(
    core: ModuleType, name: str, asked: dict[str, Any]
) -> None:
    plain = build(with_average(WRITES[name]))
    expected = train(plain, adamw(plain))
    model, optimizer = roomy(with_average(WRITES[name]), **asked)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    assert_same(model, plain, 1e-4)


@pytest.mark.parametrize("asked", ASKED[2:4], ids=str)
def test_so_is_one_that_is_trained(core: ModuleType, asked: dict[str, Any]) -> None:
    make = with_average(WRITES["in place"], Shrinking)
    plain = build(make)
    expected = train(plain, adamw(plain))
    model, optimizer = roomy(make, **asked)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    assert_same(model, plain, 1e-4)


def test_a_first_change_that_comes_late_is_not_made_by_every_slice(core: ModuleType) -> None:
    """The values ahead of it are not known: that step is refused, and the next one is whole."""
    model, optimizer = roomy(with_average(WRITES["in place"]), activations="recompute", split=2)
    average = model.blocks[1][0]
    average.writes = False
    train(model, optimizer, 4)
    unit = next(u for u in wrapped(model).units if u.name == "blocks.1")
    assert (unit.activation, unit.slices) == ("recompute", 2)
    average.writes = True
    with pytest.raises(StrataError, match=r"cannot be run on slices.*'blocks.1.0.average'"):
        train(model, optimizer, 1)
    optimizer.zero_grad()
    train(model, optimizer, 3)
    assert average.average[0].item() == pytest.approx(2 * 0.9**4)  # once for each call


@pytest.mark.parametrize("name", ["in place", "by data", "by detach"])
def test_a_trial_refuses_and_puts_back(name: str) -> None:
    module = Average(WRITES[name])
    before = module.average.detach().clone()
    version = module.average._version
    verdicts = Verdicts(module, module.forward)
    verdict = verdicts.find(Arguments(((torch.randn(6, 48),), {})))
    assert verdict is not None
    assert verdict.reason == "its forward changes the parameter 'average'"
    assert torch.equal(module.average, before)
    assert module.average._version == version
