"""Saved-tensor hooks within a unit's own forward: what they keep is read as it was, or right."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import MODELS, adamw, assert_same, batch, build, tight
from stacks import Blocks, steps
from strata._hooks import hooks
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

Hooks = Callable[[], contextlib.AbstractContextManager[Any]]


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


HOOKS: dict[str, Hooks] = {
    "none": contextlib.nullcontext,
    "as it is": lambda: saved_tensors_hooks(same, same),
    "in a tuple": lambda: saved_tensors_hooks(lambda t: (t,), lambda kept: kept[0]),
    "detached": lambda: saved_tensors_hooks(torch.Tensor.detach, same),
    "as an array": lambda: saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy),
    "copied": lambda: saved_tensors_hooks(torch.clone, same),
    "on the processor": save_on_cpu,
}


class Hooked(nn.Module):
    """Two layers, by functions and by views of their parameters, or by modules."""

    def __init__(self, made: Hooks, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.made = made
        self.way = way
        if way == "frozen":
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.made():
            if self.way == "views":  # no gradients of biases
                return F.gelu(x @ self.first.weight.t()) @ self.second.weight[:].t()
            hidden = F.gelu(F.linear(x, self.first.weight, self.first.bias))
            out: torch.Tensor = self.second(hidden)
            return out


def hooked(name: str, way: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Blocks()
        model.blocks = nn.ModuleList(Hooked(HOOKS[name], way) for _ in range(4))
        return model

    return make


def forced(model: nn.Module, activation: Any) -> None:
    for unit in wrapped(model).units:
        if activation != "recompute" or unit.may_recompute:
            unit.activation = activation


CASES = [(name, "modules") for name in list(HOOKS)[1:]]
CASES += [("as it is", "views"), ("detached", "views"), ("as it is", "frozen")]


@pytest.mark.parametrize("activation", ["keep", "swap_host", "recompute"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_what_hooks_keep_is_right_in_backward(name: str, way: str, activation: str) -> None:
    plain = build(hooked(name, way))
    expected = steps(plain, adamw(plain))
    roomy = {"memory": {"device": "1MiB", "host": "64MiB"}, "page_size": "64KiB"}
    model, optimizer = tight(build(hooked(name, way)), **(roomy if way == "frozen" else {}))
    forced(model, activation)
    if way == "frozen":  # they stay until the backward is over
        wrapped(model).session.adopt(param_bytes=5 * 65536)
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-5)
    assert_same(model, plain, 1e-4)


@pytest.mark.parametrize("activation", ["keep", "recompute"])
@pytest.mark.parametrize("name", [*MODELS, "blocks", "views"])
def test_nothing_is_held_without_such_hooks(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(hooks, "hold", lambda *told: held.append(told))
    makes = {**MODELS, "blocks": hooked("none", "modules"), "views": hooked("none", "views")}
    model, optimizer = tight(build(makes[name]))
    forced(model, activation)
    if name in MODELS:
        for _ in range(3):
            model(**batch(model)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        steps(model, optimizer)
    assert not held


@pytest.mark.parametrize("name", ["as it is", "on the processor"])
def test_hooks_that_come_later_are_noticed(name: str) -> None:
    """Every forward is looked at, so nothing has to be known of it beforehand."""

    def run(model: Any, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer)
        for block in model.blocks:
            block.made = HOOKS[name]
        return losses + steps(model, optimizer)

    plain = build(hooked("none", "modules"))
    expected = run(plain, adamw(plain))
    model, optimizer = tight(build(hooked("none", "modules")))
    assert run(model, optimizer) == pytest.approx(expected, rel=1e-5)
