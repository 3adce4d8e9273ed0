"""What a planned forward looks like from outside, and what is told of it to the recorder."""

import copy
import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from recomputed_models import Counted, compare, recomputed, with_block
from small_models import build, llama
from stacks import Blocks, blocks, steps
from strata._activations.forwards import PlannedForward
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def test_compiled_units(core: ModuleType) -> None:
    def make() -> nn.Module:
        model: Any = Blocks(count=2)
        model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="aot_eager")
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
        return model

    compare(make)


def test_what_the_forward_looks_like(core: ModuleType) -> None:
    plain = build(llama).model.layers[0]
    model, _ = recomputed(llama)
    layer: Any = model.model.layers[0]
    assert inspect.signature(layer.forward) == inspect.signature(plain.forward)
    assert layer.forward.__name__ == "forward"
    assert layer.forward.__doc__ == plain.forward.__doc__
    assert layer.forward.__func__ is type(layer).forward
    assert layer.forward.__self__ is layer


def test_copies_have_the_plain_forward(core: ModuleType) -> None:
    model, optimizer = recomputed(with_block(Counted))
    steps(model, optimizer)
    for other in (copy.deepcopy(model.blocks), pickle.loads(pickle.dumps(model.blocks))):
        block = other[2]
        assert not isinstance(block.forward, PlannedForward)
        assert block.forward.__self__ is block
        before = model.blocks[2][0].counter.runs
        block(torch.randn(3, 48)).sum().backward()
        assert model.blocks[2][0].counter.runs == before
        assert block[0].inner.weight.grad is not None


def test_unwrap_gives_the_forward_back(core: ModuleType) -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    def make() -> nn.Module:
        model: Any = Blocks()
        model.blocks[1].forward = own
        return model

    model, optimizer = recomputed(make)
    planned: Any = model.blocks[3].forward
    model.blocks[3].forward = lambda x: planned(x)  # somebody wraps it
    steps(model, optimizer)
    strata.unwrap(model)
    assert "forward" not in model.blocks[0].__dict__
    assert model.blocks[1].forward is own
    model(torch.randn(3, 48)).sum().backward()
    assert model.blocks[3][0].weight.grad is not None


def test_inputs_are_recorded(core: ModuleType) -> None:
    model, _ = recomputed(Blocks)
    recorder = wrapped(model).recorder
    recorder.begin()
    model(torch.randn(3, 48)).sum().backward()
    step = recorder.take()
    blocks_of = [u.index for u in wrapped(model).units if u.name.startswith("blocks")]
    for unit in blocks_of:
        tensors = [t for t in step.tensors if t.unit == unit]
        assert any(not t.input for t in tensors), "what the block saves beside its input"
        assert [use.backward for use in step.uses if use.unit == unit] == [False, True]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_users_recomputation_belongs_to_the_backward(
    core: ModuleType, reentrant: bool, outside: bool
) -> None:
    def segment(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        inner: Any = block[0]  # type: ignore[index]
        return x + (F.linear(x, inner.weight)[:, :48] if outside else block(x))

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(segment, block, x, use_reentrant=reentrant)
        return x

    model, _ = recomputed(
        blocks(run), memory={"device": "1MiB", "host": "64MiB"}, page_size="64KiB"
    )
    recorder = wrapped(model).recorder
    recorder.begin()
    model(torch.randn(3, 48)).sum().backward()
    step = recorder.take()
    assert step.rounds == 1
    backward = [use.backward for use in step.uses]
    assert backward == sorted(backward)
    assert backward.count(False) == (2 if outside else len(model.blocks) + 2)
    assert backward.count(True) >= len(model.blocks) + 2
