"""A trial of a second run leaves what forwards reach by their arguments and through other
modules as it was."""

import dataclasses
import functools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest
import strata
import torch
from strata._activations.arguments import Arguments
from strata._activations.trial import why_not_again
from test_run_again import WIDTH
from torch import nn


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def closure() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Counter:
    calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Bag(dict[str, Any]):
    calls = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    dice: torch.Generator = dataclasses.field(default_factory=generator)


def draw(source: torch.Generator) -> float:
    return torch.rand(1, generator=source).item()


def count_in(source: Any) -> int:
    source.calls += 1
    return int(source.calls)


# What a forward is given, and how it takes a number from there.
GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "generator": (generator, draw),
    "generator in a dictionary": (lambda: {"dice": [generator()]}, lambda d: draw(d["dice"][0])),
    "generator in an object": (Slotted, lambda d: draw(d.dice)),
    "partial": (lambda: functools.partial(draw, generator()), lambda d: d()),
    "numpy": (lambda: numpy.random.default_rng(1), lambda d: d.random()),
    "python": (lambda: random.Random(1), lambda d: d.random()),
    "iterator": (lambda: iter(range(9)), next),
    "iterator in a dictionary": (lambda: Bag(a=iter(range(9))), lambda d: next(d["a"])),
    "closure": (closure, lambda d: d()),
    "method": (lambda: Counter().__call__, lambda d: d()),
    "callable": (Counter, lambda d: d()),
    "objects in a set": (lambda: {Counter()}, lambda d: count_in(next(iter(d)))),
    "attribute of a dictionary in an object": (
        lambda: functools.partial(count_in, Bag()),
        lambda d: d(),
    ),
}  # fmt: skip


class Taker(nn.Module):
    """A layer that takes a number from what it is given."""

    def __init__(self, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.take = take

    def forward(self, x: torch.Tensor, *given: Any, source: Any = None) -> torch.Tensor:
        chosen = given[0] if given else source
        return self.inner(x if chosen is None else x * self.take(chosen))


def tried(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    nest = ((torch.ones(2, WIDTH), *args), kwargs)
    return why_not_again(module, module.forward, Arguments(nest))


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("by_keyword", [False, True], ids=["position", "keyword"])
def test_a_trial_takes_nothing_from_arguments(name: str, by_keyword: bool) -> None:
    make, take = GIVEN[name]
    given, fresh = make(), make()
    module = Taker(take)
    reason = tried(module, source=given) if by_keyword else tried(module, given)
    assert "argument of type" in reason
    assert take(given) == take(fresh)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Taker(draw) for _ in range(3))

    def forward(self, x: torch.Tensor, source: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, source=source)
        return x


def test_arguments_of_another_kind_are_tried_again(core: ModuleType) -> None:
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        net: Any = Whole()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        if wraps:
            memory = {"device": "8MiB", "host": "16MiB"}
            net, optimizer = strata.wrap(net, optimizer, memory=memory, activations="recompute")
        dice, losses = generator(), []
        for source in (None, None, dice, dice, dice):
            loss = net(torch.randn(8, WIDTH), source).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append([*losses, draw(dice)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class Parent(nn.Module):
    """A module with state, with a module below it that has some, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dice = generator()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.below = nn.Identity()
        self.below.calls = 0
        self.below.register_forward_hook(lambda *_: SEEN.append(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.below(x)

    def state(self) -> Any:
        own = self.calls, self.below.calls, self.dice.get_state().tolist(), len(SEEN)
        return *own, self.norm.running_mean.tolist(), "late" in vars(self)


SEEN: list[int] = []


def counts_there(parent: Any, x: torch.Tensor) -> torch.Tensor:
    parent.calls += 1
    return x


def counts_below(parent: Any, x: torch.Tensor) -> torch.Tensor:
    parent.below.calls += 1
    return x


def draws_there(parent: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=parent.dice)


def normalises_there(parent: Any, x: torch.Tensor) -> torch.Tensor:
    return parent.norm(x)


def adds_there(parent: Any, x: torch.Tensor) -> torch.Tensor:
    parent.late = 1
    return x


def calls_there(parent: Any, x: torch.Tensor) -> torch.Tensor:
    return parent(x)


WAYS: dict[str, Callable[[nn.Module, Parent], Callable[[], Any]]] = {
    "attribute": lambda m, p: (object.__setattr__(m, "parent", p), lambda: m.parent)[1],
    "list": lambda m, p: (setattr(m, "others", [p]), lambda: m.others[0])[1],
    "closure": lambda m, p: lambda: p,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "body",
    [counts_there, counts_below, draws_there, normalises_there, adds_there, calls_there],
    ids=lambda body: body.__name__,
)
def test_a_trial_leaves_modules_of_others_as_they_were(way: str, body: Any) -> None:
    class Child(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self.find(), x)

    parent, child = Parent(), Child()
    object.__setattr__(parent, "child", child)
    child.find = WAYS[way](child, parent)
    before = parent.state()
    reason = tried(child)
    assert parent.state() == before
    assert ("changes what" in reason) == (body is not calls_there)
