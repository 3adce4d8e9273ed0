"""Graphs with swapped tensors: changed in place, used twice, dropped, broken off, interleaved."""

import copy
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import MODELS, adamw, assert_same, build, tight, train
from stacks import Blocks, steps
from strata._activations import swapping
from strata._runtime.wrapped import Wrapped
from swapped_models import Counts, is_idle, make_swapping, recipes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


def test_a_change_in_place_is_noticed(core: ModuleType) -> None:
    def during(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = y * y
        y.add_(1)
        return z

    model, _, state = make_swapping(recipes(during))
    with pytest.raises(RuntimeError, match="modified"):
        model(torch.randn(2, 48)).sum().backward()

    held: list[torch.Tensor] = []

    def later(self: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(self.inner(x))
        return held[-1] * held[-1]

    model, _, state = make_swapping(recipes(later))
    loss = model(torch.randn(2, 48)).sum()
    state.hooks.swapping.drain()
    with torch.no_grad():
        held[0][1:].mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    held.clear()
    del loss
    assert is_idle(state)


def test_a_storage_saved_before_and_after_a_change(core: ModuleType) -> None:
    """Only the later value is read in backward: nothing is wrong, and it must be that value."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        first = (y * y).sum()  # saves it; nobody asks for its gradient
        for state in states:
            state.hooks.swapping.drain()
        y.mul_(2)
        return self.outer(y.exp() + y * y + first.detach())

    states: list[Wrapped] = []
    model = recipes(run)
    plain = copy.deepcopy(model)
    model, _, state = make_swapping(model)
    states.append(state)
    x = torch.randn(3, 48, requires_grad=True)
    model(x).sum().backward()
    found, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(found, x.grad)
    assert is_idle(state)


def test_backward_twice(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, state = make_swapping(build(Blocks), gradient_accumulation_steps=2)
    plain = build(Blocks)
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
    loss = model(x).square().sum()
    state.hooks.swapping.drain()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    fetches = len(counts.fetches)
    assert fetches > 0
    assert state.hooks.swapping.drain() > 0
    (second,) = torch.autograd.grad(loss, x)
    assert len(counts.fetches) == 2 * fetches  # between the two nothing was on the device
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    del loss
    assert is_idle(state)
    assert not counts.live


def test_second_derivative(core: ModuleType) -> None:
    def penalty(model: nn.Module, state: Wrapped | None) -> torch.Tensor:
        x = torch.linspace(-1, 1, 48).expand(2, 48).clone().requires_grad_()
        out = model(x).exp().sum()
        if state:
            state.hooks.swapping.drain()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = penalty(build(Blocks), None)
    model, _, state = make_swapping(build(Blocks))
    torch.testing.assert_close(penalty(model, state), expected)
    assert is_idle(state)


def test_a_graph_without_backward_leaves_nothing(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, state = make_swapping(build(MODELS["gpt2"]))
    counts = Counts(state, monkeypatch)
    tokens = torch.randint(0, 64, (2, 12))
    loss = model(input_ids=tokens, labels=tokens).loss
    assert counts.live
    del loss
    assert is_idle(state)
    assert not counts.live
    train(model, optimizer, 1)
    assert is_idle(state)
    assert not counts.live


@pytest.mark.parametrize("mode", ["keep", "swap_host"])
def test_outputs_saved_by_their_own_node_are_freed(core: ModuleType, mode: str) -> None:
    """exp() saves its result, which refers to exp(): no cycle may come of it."""
    outputs: list[StorageWeakRef] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).exp()
        outputs.append(StorageWeakRef(y.untyped_storage()))
        return self.outer(y)

    model, _, state = make_swapping(recipes(run), mode)
    model(torch.randn(3, 48))
    state.hooks.swapping.drain()
    assert len(outputs) == 2
    assert all(y.expired() for y in outputs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing(core: ModuleType, where: str) -> None:
    armed = [True]

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "forward":
                raise ValueError("boom")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if armed[0]:
                raise ValueError("boom")
            return grad

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).exp()
        return self.outer(Bomb.apply(y) if self.bomb else y)

    def make() -> nn.Module:
        model = recipes(run, 4)
        for i, part in enumerate(model):
            part.bomb = i == 2
        return model

    model, optimizer, state = make_swapping(make())
    with pytest.raises(ValueError, match="boom"):
        model(torch.randn(3, 48)).sum().backward()
    assert is_idle(state)
    optimizer.zero_grad()
    armed[0] = False
    plain = make()
    assert steps(model, optimizer) == pytest.approx(steps(plain, adamw(plain)), rel=1e-6)
    assert is_idle(state)


def test_a_disk_that_fails_is_the_callers_error(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise strata.StrataError("the disk failed")

    plain = build(Blocks)
    model, _, state = make_swapping(build(Blocks))
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    loss = model(x).square().sum()
    state.hooks.swapping.drain()
    with monkeypatch.context() as broken:
        broken.setattr(counts.session, "fetch_activation", fail, raising=False)
        with pytest.raises(strata.StrataError, match="the disk failed"):
            torch.autograd.grad(loss, x)
    del loss
    assert is_idle(state)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_swapped_unit(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        y = checkpoint(lambda v: self.outer(F.gelu(v)), x, use_reentrant=reentrant)
        return x + y.exp()

    plain = recipes(run)
    model, optimizer, state = make_swapping(copy.deepcopy(plain))
    counts = Counts(state, monkeypatch)
    assert steps(model, optimizer) == pytest.approx(steps(plain, adamw(plain)), rel=1e-6)
    # Each step and unit: its input, the checkpoint's and exp(), and nothing of what that one drops.
    assert len(counts.saves) == 3 * 2 * 3
    assert is_idle(state)


def test_evaluation_between_forward_and_backward(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _, state = make_swapping(build(Blocks))
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    loss = model(x).square().sum()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, 48))
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    del loss
    assert is_idle(state)


def test_two_forwards_before_their_backwards(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _, state = make_swapping(build(Blocks))
    inputs = [torch.randn(3, 48, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(sum(plain(x).square().sum() for x in inputs), inputs)
    found = torch.autograd.grad(sum(model(x).square().sum() for x in inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert is_idle(state)


def test_two_models(core: ModuleType) -> None:
    plain = [build(Blocks, seed) for seed in (0, 1)]
    both = [make_swapping(copy.deepcopy(m)) for m in plain]
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain[1](plain[0](x)).square().sum(), x)
    (found,) = torch.autograd.grad(both[1][0](both[0][0](x)).square().sum(), x)
    assert torch.equal(found, expected)
    for _, _, state in both:
        assert is_idle(state)


def test_a_unit_called_twice(core: ModuleType) -> None:
    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return x

    def make() -> nn.Module:
        model = build(Blocks)
        model.run = twice
        return model

    kept, kept_optimizer = tight(make())
    model, optimizer, state = make_swapping(make())
    assert steps(model, optimizer) == steps(kept, kept_optimizer)
    assert_same(model, kept)
    assert is_idle(state)


def test_unwrap_waits_for_copies(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = make_swapping(build(Blocks))
    steps(model, optimizer)
    counts = Counts(state, monkeypatch, slow=True)
    loss = model(torch.randn(3, 48)).sum()
    assert counts.leaving
    strata.unwrap(model)
    assert not counts.leaving
    with pytest.raises(RuntimeError):
        loss.backward()
    steps(model, adamw(model))
