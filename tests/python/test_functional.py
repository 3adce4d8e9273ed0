"""Tensors in the place of parameters: torch.func, and what is exchanged by hand and put back.

With the real core: the other one computes with tensors, which torch.func would see.
"""

from collections.abc import Callable
from typing import Any

import pytest
import strata
import torch
from small_models import build
from torch import func, nn
from torch.nn.utils import parametrize

WIDTH = 16
X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
Optimizer = torch.optim.Optimizer


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def linear(model: nn.Module) -> Any:
    return model.get_submodule("1.0")


def average(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    with torch.no_grad():
        whole = func.functional_call(model, {k: v * 0.5 for k, v in copies(model).items()}, (X,))
        return [whole, func.functional_call(model, {"1.0.weight": torch.ones(WIDTH, WIDTH)}, (X,))]


def per_sample(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    def loss(params: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return func.functional_call(model, params, (row[None],)).square().mean()

    return list(func.vmap(func.grad(loss), (None, 0))(copies(model), X).values())


def a_part_in_training(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    given = {"1.0.weight": nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))}
    for _ in range(2):
        func.functional_call(model, given, (X,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [given["1.0.weight"].grad]


def all_in_training(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    given = {name: nn.Parameter(value) for name, value in copies(model).items()}
    func.functional_call(model, given, (X,)).square().mean().backward()
    return [p.grad for p in given.values()]


def maml(model: nn.Module, optimizer: Optimizer) -> None:
    """The inner step's gradient is differentiated, too."""
    for _ in range(2):
        own = dict(model.named_parameters())
        loss = func.functional_call(model, own, (X,)).square().mean()
        grads = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(own.items(), grads, strict=True)}
        func.functional_call(model, fast, (X + 1,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def own_views(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    given = {name: p.detach() for name, p in model.named_parameters()}
    return [func.functional_call(model, given, (X,))]


def another_of_its_own(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    other = model.get_parameter("2.0.weight")
    return [func.functional_call(model, {"0.0.weight": other}, (X,)).detach()]


def by_hand(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    layer = linear(model)
    old, layer.weight = layer.weight, nn.Parameter(torch.ones(WIDTH, WIDTH))
    with torch.no_grad():
        seen = model(X)
    layer.weight = old
    return [seen]


def made_by_another_network(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    layer, source = linear(model), torch.ones(WIDTH, WIDTH, requires_grad=True)
    old = layer.weight
    del layer.weight
    layer.weight = source * 0.1
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del layer.weight
    layer.weight = old
    return [source.grad]


def swapped_and_back(model: nn.Module, optimizer: Optimizer) -> None:
    own, other = linear(model).weight, nn.Parameter(torch.ones(WIDTH, WIDTH))
    torch.utils.swap_tensors(own, other)
    if "_strata" in model.__dict__:
        with pytest.raises(RuntimeError, match=r"1\.0\.weight' was given other memory"):
            model(X)
    torch.utils.swap_tensors(own, other)


def parametrised(model: nn.Module, optimizer: Optimizer) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).t()

    parametrize.register_parametrization(linear(model), "weight", Symmetric())
    train(model, optimizer)
    parametrize.remove_parametrizations(linear(model), "weight", leave_parametrized=False)


def forward_mode(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return [*func.jvp(model, (X,), (X,)), func.jacfwd(model)(X[:1]), func.vmap(model)(X)]


PROGRAMS: list[Callable[[nn.Module, Optimizer], list[Any] | None]] = [
    average, per_sample, a_part_in_training, all_in_training, maml, own_views, another_of_its_own,
    by_hand, made_by_another_network, swapped_and_back, parametrised, forward_mode,
]  # fmt: skip


def wrapped(**more: Any) -> tuple[Any, Any]:
    model = build(make)
    room = {"memory": {"device": "256KiB", "host": "8MiB"}, "page_size": "64KiB"}
    return strata.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **room, **more)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_what_was_exchanged_is_used(
    program: Callable[[nn.Module, Optimizer], Any], activations: Any
) -> None:
    """As in plain PyTorch, between steps that train as if nothing had been exchanged."""
    plain = build(make)
    results = []
    for model, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
        wrapped(activations=activations),
    ):
        train(model, optimizer)
        found = program(model, optimizer) or []
        train(model, optimizer)
        results.append([*found, *dict(sorted(copies(model).items())).values()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "input gradients": (lambda m: func.grad(lambda x: m(x).sum())(X), r"disabled here, by torch.*"),
    "a Jacobian": (lambda m: func.jacrev(m)(X), r"functional_call\(model, \{name: p\.detach"),
    "a parameter in a closure": (
        lambda m: func.grad(lambda x: (x @ linear(m).weight).sum())(X),
        r"disabled here, by torch.*",
    ),
    "its own parameters": (
        lambda m: func.grad(lambda ps: func.functional_call(m, ps, (X,)).sum())(
            dict(m.named_parameters())
        ),
        r"given parameter '0\.0\.weight' itself.*copies",
    ),
    "views of its own": (
        lambda m: func.grad(lambda ps: func.functional_call(m, ps, (X,)).sum())(
            {name: p.detach() for name, p in m.named_parameters()}
        ),
        r"given parameter '0\.0\.weight' itself.*copies",
    ),
    "one exchanged for good": (
        lambda m: (setattr(linear(m), "weight", nn.Parameter(torch.ones(16, 16))), m(X)),
        r"'1\.0\.weight' was exchanged for another one after strata\.wrap",
    ),
    "one that is gone": (
        lambda m: (delattr(linear(m), "weight"), m(X)),
        r"'1\.0\.weight' was removed from its module after strata\.wrap",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str) -> None:
    """And the model goes on where nothing was exchanged for good."""
    program, words = REFUSED[name]
    model, optimizer = wrapped()
    layer = linear(model)
    weight = layer.weight
    with pytest.raises(RuntimeError, match=words):
        program(model)
    layer.weight = weight
    plain = build(make)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    train(model, optimizer)
    found, expected = copies(model), copies(plain)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
