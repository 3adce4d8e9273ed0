"""What a forward changes is counted once, also where backward runs it a second time."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import strata
import torch
from recomputed_models import compare, recompute, recomputed, with_block
from small_models import adamw, assert_same, build, tight
from stacks import steps
from strata._activations import inputs
from torch import nn


class Late(nn.Module):
    """Changes its buffer only from some forward on, in one of many ways."""

    def __init__(self, change: Callable[[Any], None], since: int) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", torch.zeros(40_000))  # too large to be copied each time
        self.register_buffer("lines", torch.arange(48.0))
        self.change = change
        self.since = since

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        y = torch.tanh(self.inner(x - self.late[:48])) * torch.exp(-self.late[0])
        if self.step > self.since:
            self.change(self)
        return y * (1 + self.late[-48:])


def exchange(block: Any) -> None:
    block.late = block.late + 0.01


def write(block: Any) -> None:
    block.late += 0.01


def write_silently(block: Any) -> None:
    """As kernels of batch normalisation do."""
    version = block.late._version
    block.late.add_(0.01)
    torch._C._autograd._unsafe_set_version_counter((block.late,), (version,))


def register(block: Any) -> None:
    """A buffer that is new, and one that goes."""
    if "new" not in block._buffers:
        block.register_buffer("new", torch.zeros(48))
        del block.lines
    block.new += 1
    block.late += 0.001 * block.new.sum()


CHANGES = [exchange, write, write_silently, register]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("slices", [1, 3])
def test_buffers_that_change_late(
    core: ModuleType, change: Callable[[Any], None], slices: int
) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        return steps(model, optimizer, 3, backwards=2)

    found = []
    for wrap in (tight, recomputed_by(slices)):
        late = build(with_block(lambda: Late(change, 3)))
        model, optimizer = wrap(late, gradient_accumulation_steps=2)
        losses = loop(model, optimizer)
        found.append((losses, {name: b.clone() for name, b in model.named_buffers()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=0 if slices == 1 else 1e-6)
    assert found[0][1].keys() == found[1][1].keys()
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-6, atol=1e-6, msg=name)
    assert model.blocks[2][0].step == 6


def recomputed_by(slices: int) -> Callable[..., Any]:
    def wrap(model: nn.Module, **more: Any) -> Any:
        model, optimizer = tight(model, **more)
        return recompute(model, slices), optimizer

    return wrap


def test_a_module_called_twice_around_a_change(core: ModuleType) -> None:
    """The second call changes what the first one read, and did not change."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](x + self.blocks[2](x))  # type: ignore[no-any-return]

    def make() -> nn.Module:
        model = with_block(lambda: Late(write, 1))()
        model.run = run
        return model

    compare(make)


def test_tables_cost_no_memory(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test of this process may have loaded what captures CUDA graphs.
    monkeypatch.setattr(inputs, "graphs_in_use", lambda: False)
    model, optimizer = recomputed(with_block(lambda: Late(write, 100)))
    block = model.blocks[2][0]
    address = block.late.const_data_ptr() if hasattr(block.late, "const_data_ptr") else None
    steps(model, optimizer)
    assert torch._C._is_cow_tensor(block.late)  # type: ignore[attr-defined]
    assert address is None or block.late.const_data_ptr() == address


def test_buffers_in_memory_that_cannot_be_shared(core: ModuleType) -> None:
    def make() -> nn.Module:
        block = Late(write, 3)
        block.late = torch.from_numpy(np.zeros(40_000, np.float32))
        return block

    compare(with_block(make), lambda model, optimizer: steps(model, optimizer, 5))


class Writes(nn.Module):
    """Changes its parameter in place in its forward."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self.inner.weight)
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("wrap", [tight, lambda model: recomputed_by(1)(model)])
def test_parameters_that_a_second_run_leaves_alone(
    core: ModuleType, wrap: Callable[[nn.Module], Any]
) -> None:
    make = with_block(lambda: Writes(lambda p: p.clamp_(-0.05, 0.05)))
    plain = build(make)
    expected = steps(plain, adamw(plain))
    model, optimizer = wrap(build(make))
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_parameters_that_a_second_run_would_change_again(core: ModuleType) -> None:
    """The unit is not computed again: a trial has found it out."""
    compare(with_block(lambda: Writes(lambda p: p.mul_(0.5))))


def test_parameters_that_are_first_changed_after_the_trial(core: ModuleType) -> None:
    factor = [1.0]

    def change(parameter: torch.Tensor) -> None:
        if factor[0] != 1:
            parameter.mul_(factor[0])

    model, optimizer = recomputed(with_block(lambda: Writes(change)))
    steps(model, optimizer, 1)
    weight = model.blocks[2][0].inner.weight
    factor[0], expected = 0.5, 0.5 * weight.clone()
    loss = model(torch.randn(3, 48)).sum()
    with pytest.raises(strata.StrataError, match=r"blocks.2.*inner.weight.* in place"):
        loss.backward()
    assert torch.equal(weight.clone(), expected)
