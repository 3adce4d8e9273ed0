"""Graphs: checkpointing, exceptions in the middle, second derivatives, stale graphs."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import (
    adamw,
    assert_same,
    build,
    llama,
    tight,
    train,
)
from stacks import Blocks, blocks, compare, steps
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_whole_blocks(core: ModuleType, reentrant: bool) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return x

    compare(blocks(run))


def test_checkpoint_of_several_blocks_and_outside_reads(core: ModuleType) -> None:
    def segment(self: Any, x: torch.Tensor, i: int) -> torch.Tensor:
        x = x + self.blocks[i](x)
        x = x + F.linear(x, self.embed.weight)  # read outside its module, under checkpoint
        return x + self.blocks[i + 1](x)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 2):
            x = checkpoint(segment, self, x, i, use_reentrant=False)
        return x

    model, optimizer = build(blocks(run)), None
    plain = copy.deepcopy(model)
    expected = steps(plain, adamw(plain))
    # The parameter read outside stays on the device for the whole segment: room for two units.
    model, optimizer = tight(model, memory={"device": "256KiB", "host": "64MiB"}, page_size="64KiB")
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_checkpoint_inside_a_block(core: ModuleType) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(48, 96)
            self.down = nn.Linear(96, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda v: self.down(F.gelu(self.up(v))), x, use_reentrant=False)
            return x + F.linear(y, self.up.weight.t() @ self.down.weight.t())

    def make() -> nn.Module:
        model = Blocks()
        model.blocks = nn.ModuleList(Inner() for _ in range(4))
        return model

    compare(make)


def test_transformers_gradient_checkpointing(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    compare(make, train)


def test_checkpoint_recomputes(core: ModuleType) -> None:
    """Our hooks must not keep from checkpoint what it is there to drop."""
    runs = []

    def counted(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + block(x)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(counted, block, x, use_reentrant=False)
        return x

    model, _ = tight(build(blocks(run)))
    model(torch.randn(3, 48)).sum().backward()
    assert len(runs) == 2 * len(model.blocks)


def test_somebody_elses_saved_tensor_hooks(core: ModuleType) -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return steps(model, optimizer)

    compare(Blocks, loop)
    assert packed


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no `except Exception` sees it."""


@pytest.mark.parametrize("kind", [ValueError, Interrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(
    core: ModuleType, where: str, kind: type[BaseException]
) -> None:
    armed = [False]

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "forward":
                raise kind("boom")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "backward":
                raise kind("boom")
            return grad

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(Bomb.apply(self.inner(x)))
            return out

    def make() -> nn.Module:
        model = Blocks()
        model.blocks[2] = nn.Sequential(Fragile())
        return model

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer, 1)
        armed[0] = True
        with pytest.raises(kind, match="boom"):
            model(torch.randn(3, 48)).sum().backward()
        armed[0] = False
        optimizer.zero_grad()
        return losses + steps(model, optimizer, 2)

    compare(make, loop)


def test_graph_kept_over_a_step_is_refused(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    old = model(torch.randn(3, 48)).square().sum()
    model(torch.randn(3, 48)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified"):
        old.backward()
    optimizer.zero_grad()
    steps(model, optimizer)


def test_activation_changed_in_place_is_noticed(core: ModuleType) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            z = y * y
            y.add_(1)
            return z

    model, _ = tight(nn.Sequential(Square(), nn.Sequential(nn.Linear(48, 48))))
    with pytest.raises(RuntimeError, match="modified"):
        model(torch.randn(2, 48)).sum().backward()


def test_autograd_grad(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _ = tight(build(Blocks))
    x = torch.randn(3, 48)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# What backward(inputs=) is given.
INPUTS: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: list(model.parameters()),
    "tuple": lambda model: tuple(model.blocks[1].parameters()),
    "some": lambda model: [model.embed.bias, model.blocks[1][2].weight, model.head.weight],
    "one": lambda model: model.blocks[2][0].weight,
}
WAYS: dict[str, Callable[[torch.Tensor, Any], None]] = {
    "tensor": lambda loss, inputs: loss.backward(inputs=inputs),
    "function": lambda loss, inputs: torch.autograd.backward([loss], inputs=inputs),
    "function of one": lambda loss, inputs: torch.autograd.backward(loss, inputs=inputs),
}


@pytest.mark.parametrize("update", ["on_step", "in_backward", strata.LockFree(0)], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", INPUTS)
def test_backward_to_inputs_alone(core: ModuleType, which: str, way: str, update: Any) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[list[str]]:
        torch.manual_seed(1)
        had = []
        for _ in range(3):
            WAYS[way](model(torch.randn(3, 48)).square().sum(), INPUTS[which](model))
            had.append([name for name, p in model.named_parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        return had

    plain, inner = build(Blocks), build(Blocks)
    expected = loop(plain, torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9))
    sgd = torch.optim.SGD(inner.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = tight(inner, sgd, update=update)
    assert loop(model, optimizer) == expected
    assert_same(model, plain, 1e-6)


@pytest.mark.parametrize("activations", ["recompute", "swap", "auto"])
def test_backward_to_inputs_alone_under_a_plan(activations: str) -> None:
    def loop(model: Any, optimizer: Any) -> list[list[str]]:
        torch.manual_seed(1)
        had = []
        for _ in range(4):
            inputs = [p for p in model.parameters() if p.ndim > 1]
            model(torch.randn(4, 48)).square().sum().backward(inputs=inputs)
            had.append([name for name, p in model.named_parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        return had

    plain, inner = build(Blocks), build(Blocks)
    expected = loop(plain, adamw(plain))
    more: dict[str, Any] = {"split": 2} if activations == "recompute" else {}
    memory = {"device": "512KiB", "host": "64MiB"}
    model, optimizer = tight(
        inner, activations=activations, memory=memory, page_size="64KiB", **more
    )
    assert loop(model, optimizer) == expected
    assert_same(model, plain, 1e-5)


def test_backward_to_a_generator(core: ModuleType) -> None:
    plain, (model, _) = build(Blocks), tight(build(Blocks))
    for m in (plain, model):
        try:
            m(torch.ones(3, 48)).sum().backward(inputs=(p for p in m.blocks.parameters()))
        except TypeError:
            assert m is plain
            pytest.skip("this version of torch takes none")
        assert m.head.weight.grad is None
    for mine, expected in zip(model.blocks.parameters(), plain.blocks.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.clone(), expected.grad)


def test_backward_of_a_parameter_itself(core: ModuleType) -> None:
    plain, (model, _) = build(Blocks), tight(build(Blocks))
    for m in (plain, model):
        torch.autograd.backward(m.head.weight[0, 0], inputs=[m.head.weight, m.embed.bias])
        assert m.embed.bias.grad is None
    assert torch.equal(model.head.weight.grad.clone(), plain.head.weight.grad)


def test_backward_to_a_view(core: ModuleType) -> None:
    plain, (model, _) = build(Blocks), tight(build(Blocks))
    for m in (model, plain):
        row = m.head.weight[0]
        (m(torch.ones(3, 48)).sum() + (row * 3).sum()).backward(inputs=[row, m.embed.bias])
        assert m.head.weight.grad is None
        assert torch.equal(row.grad, torch.full((48,), 3.0))
    torch.testing.assert_close(model.embed.bias.grad.clone(), plain.embed.bias.grad)
    with pytest.raises(RuntimeError, match="empty"):
        model(torch.ones(3, 48)).sum().backward(inputs=[])


def test_second_derivative(core: ModuleType) -> None:
    def penalty(model: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 48).expand(2, 48).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        if "_strata" in model.__dict__:
            return [strata.gather_grad(p) for p in model.parameters()]  # type: ignore[misc]
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    expected = penalty(build(Blocks))
    found = penalty(tight(build(Blocks))[0])
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
