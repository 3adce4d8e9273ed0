"""`p.data = value`: what `p.data` was before keeps its values, and no more of it changes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build, tight
from strata._runtime.paged import PagedTensor
from torch import nn

WIDTH = 48
UPDATE = "in_backward"


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])


def sgd(made: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(made)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (model(torch.ones(2, WIDTH)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def average_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The averaged weights are evaluated, and training goes on from its own."""
    shadow = {name: p.detach().clone() * 0.5 for name, p in model.named_parameters()}
    backup, seen = {}, []
    for _ in range(2):
        step(model, optimizer)
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            seen.append(model(torch.ones(2, WIDTH)))
        for name, p in model.named_parameters():
            p.data = backup[name]
    return [*seen, *shadow.values()]


@torch.inference_mode()
def in_inference_mode(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0
    seen = model(torch.ones(2, WIDTH))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data = value
    return [seen]


def exchanged_with_others(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """A tensor of the user's takes the memory of a parameter, and gives it back."""
    average = [nn.Parameter(p.detach().clone() * 0.5) for p in model.parameters()]
    seen: list[Any] = []
    for _ in range(2):
        step(model, optimizer)
        for _ in range(2):
            for ours, p in zip(average, model.parameters(), strict=True):
                ours.data, p.data = p.data, ours.data
            with torch.no_grad():
                seen.append(model(torch.ones(2, WIDTH)))
    assert all(type(ours) is nn.Parameter for ours in average)
    return [*seen, *average]


def exchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    a, b = model.get_parameter("0.0.weight"), model.get_parameter("3.0.weight")
    a.data, b.data = b.data, a.data


def views_of_views(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    p = model.get_parameter("1.0.weight")
    whole, flat = p.data, p.view(-1)
    row, words = whole[3], p.detach().view(torch.int32)[4:]
    columns = whole.t()[2:7]
    p.data = torch.ones(WIDTH, WIDTH)
    whole.mul_(2)  # what shared memory shares it still
    return [whole, flat, row, words, columns]


def before_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """In place is seen, another memory is not."""
    kept = [p.detach() for p in model.parameters()]
    step(model, optimizer)
    seen = [t.clone() for t in kept]
    for p in model.parameters():
        p.data = p.data * 0
    step(model, optimizer)
    return seen + kept


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    kept = model.state_dict()
    model._apply(lambda t: t * 2)
    found = [t.clone() for t in kept.values()]
    model.load_state_dict(kept)
    return found


def of_itself(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    p = model.get_parameter("1.0.weight")
    kept = p.data
    p.data = p.data.t()
    return [kept]


def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    p = model.get_parameter("1.0.weight")
    kept = p.data
    p.data = p.data.detach()
    p.data = p
    kept.add_(1)
    return [kept]


def of_a_view(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The view goes elsewhere, the parameter stays."""
    view = model.get_parameter("1.0.weight").data
    view.data = torch.zeros(3)
    return [view.add_(1)]


def a_vector(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    kept = [p.data for p in model.parameters()]
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return kept


def unwrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Views are of the parameters that the model gets back."""
    kept = [p.detach() for p in model.parameters()]
    if "_strata" in model.__dict__:
        strata.unwrap(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return kept


@pytest.mark.parametrize(
    "program",
    [
        average_and_back, in_inference_mode, exchanged, exchanged_with_others, views_of_views,
        before_a_step, state_dict, of_itself, unchanged, of_a_view, a_vector, unwrapped,
    ],
)  # fmt: skip
def test_what_was_handed_out_keeps_its_values(
    core: ModuleType, program: Callable[..., list[Any] | None]
) -> None:
    plain, inner = sgd(make)
    model, optimizer = tight(*sgd(make))
    found, expected = program(model, optimizer) or [], program(plain, inner) or []
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(model, plain)


def test_a_view_cannot_take_the_memory_of_a_parameter(core: ModuleType) -> None:
    model, _ = tight(build(make))
    view, other = (model.get_parameter(f"{i}.0.weight").data for i in range(2))
    with pytest.raises(RuntimeError, match=r"use p\.clone"):
        view.data = other
    assert type(view) is PagedTensor


class Normed(nn.Linear):
    """Gives its weight other memory in its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


@pytest.mark.parametrize(
    "more",
    [{}, {"activations": "recompute", "split": 2}, {"activations": "swap"}, {"update": UPDATE}],
    ids=str,
)
def test_a_forward_that_rebinds_its_own_parameter(core: ModuleType, more: dict[str, Any]) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(Normed(WIDTH, WIDTH)) for _ in range(3)])

    plain, inner = sgd(normed)
    room = {"memory": {"device": "256KiB", "host": "64MiB"}, "page_size": "64KiB"} if more else {}
    model, optimizer = tight(*sgd(normed), **more, **room)
    before = [p.data for p in model.parameters()]
    values = [t.clone() for t in before]
    for _ in range(3):
        step(plain, inner)
        step(model, optimizer)
    assert all(map(torch.equal, before[::2], values[::2]))  # of weights; biases change in place
    assert_same(model, plain, 1e-6)


def test_a_forward_that_gives_its_parameter_another_shape(core: ModuleType) -> None:
    class Grows(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = torch.zeros(2 * WIDTH, WIDTH)
            return x

    model, _ = tight(nn.Sequential(*[nn.Sequential(Grows(WIDTH, WIDTH)) for _ in range(2)]))
    with pytest.raises(RuntimeError, match=r"0\.0\.weight' cannot become .*\(96, 48\)"):
        model(torch.ones(2, WIDTH))
    assert model.get_parameter("0.0.weight").shape == (WIDTH, WIDTH)


@pytest.mark.parametrize(
    "move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")], ids=["to", "to_empty"]
)
def test_a_model_is_not_moved_to_where_nothing_is(core: ModuleType, move: Any) -> None:
    model, optimizer = tight(*sgd(make))
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"0\.0\.weight' cannot become .* on meta .*drop the"):
        move(model)
    assert all(p is before[name] for name, p in model.named_parameters())
    step(model, optimizer)
