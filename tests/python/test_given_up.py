"""What exceptions leave behind that no `finally` of ours runs for: other people's saved-tensor
hooks, other threads, parameters that were plain meanwhile."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build, tight
from stacks import Blocks, compare, steps
from strata._runtime.wrapped import Wrapped, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def interrupted_in(module: nn.Module) -> Iterator[None]:
    """A KeyboardInterrupt in the middle of the module's forward: torch calls no hook behind it."""

    def raise_there(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(raise_there)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()


def entered_of(state: Wrapped) -> int:
    return sum(state.session.entered(unit.index) for unit in state.units)


def top_hooks() -> Any:
    gc.collect()  # what pytest caught holds the frames that it came through, in a cycle
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def in_hooks(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            x = block(x)
    return x


@pytest.mark.parametrize("run", [checkpointed, in_hooks])
def test_hooks_of_others_are_left_by_those_who_put_them_there(
    core: ModuleType, run: Callable[..., torch.Tensor]
) -> None:
    def make() -> nn.Module:
        model = Blocks()
        model.run = run
        return model

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer, 1)
        with interrupted_in(model.blocks[1][1]):
            model(torch.randn(3, 48))
        optimizer.zero_grad()
        assert top_hooks() is None
        return losses + steps(model, optimizer, 2)

    compare(make, loop)


def test_hooks_around_the_loop_stay(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        mine = top_hooks()[0]
        with interrupted_in(model.blocks[1][1]):
            model(torch.randn(3, 48))
        optimizer.zero_grad()
        assert top_hooks()[0] is mine
        steps(model, optimizer)
    assert top_hooks() is None


def test_state_that_is_read_after_an_exception(core: ModuleType) -> None:
    """Parameters were plain ones when it came: what is read of them must not be their memory."""
    model, optimizer = tight(build(Blocks))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with interrupted_in(model.blocks[1][1]):
        model(torch.randn(3, 48))
    kept = model.blocks[1].state_dict()
    optimizer.zero_grad()
    steps(model, optimizer, 0)
    for name, value in kept.items():
        assert torch.equal(value, before[f"blocks.1.{name}"])


def test_written_behind_an_exception(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    plain = build(Blocks)
    with interrupted_in(model.blocks[1][1]):
        model(torch.randn(3, 48))
    for m in (model, plain):
        with torch.no_grad():
            m.blocks[1][0].weight.mul_(2)
            m.blocks[2][0].weight.mul_(2)
            m.blocks[1][0].bias.copy_(torch.ones(96))
    assert_same(model, plain)
    optimizer.zero_grad()
    assert_same(model, plain)


def test_forwards_of_several_threads(core: ModuleType) -> None:
    """One is interrupted, and ends; what the others have entered stays."""
    model, _ = tight(build(Blocks), memory={"device": "4MiB", "host": "64MiB"})
    plain = build(Blocks)
    state = wrapped(model)
    inside, go_on = threading.Event(), threading.Event()
    results = []

    def wait_there(*args: Any) -> None:
        if threading.current_thread() is slow:
            inside.set()
            go_on.wait(300)

    x = torch.randn(3, 48)

    def evaluate() -> None:
        with torch.no_grad():
            results.append(model(x))

    handle = model.blocks[1][1].register_forward_pre_hook(wait_there)
    slow = threading.Thread(target=evaluate)
    slow.start()
    inside.wait(300)
    entered = entered_of(state)
    assert entered
    evaluate()
    with interrupted_in(model.blocks[3][1]):
        evaluate()
    assert entered_of(state) > entered
    state.hooks.reset()
    assert entered_of(state) == entered
    go_on.set()
    slow.join()
    handle.remove()
    assert not entered_of(state)
    with torch.no_grad():
        expected = plain(x)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


@pytest.mark.parametrize("core", ["real"], indirect=True)  # the double has no lock
def test_no_step_under_the_forward_of_another_thread(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    inside, go_on = threading.Event(), threading.Event()

    def wait_there(*_: Any) -> None:
        if threading.current_thread() is slow:
            inside.set()
            go_on.wait(300)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(3, 48))

    slow = threading.Thread(target=evaluate)
    model.blocks[1][1].register_forward_pre_hook(wait_there)
    model(torch.randn(3, 48)).square().sum().backward()
    slow.start()
    inside.wait(300)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        optimizer.step()
    go_on.set()
    slow.join()
    optimizer.step()
    optimizer.zero_grad()
    steps(model, optimizer)


def test_a_thread_that_died_in_a_forward(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    state = wrapped(model)

    def die() -> None:
        with interrupted_in(model.blocks[1][1]), torch.no_grad():
            model(torch.randn(3, 48))

    dead = threading.Thread(target=die)
    dead.start()
    dead.join()
    assert entered_of(state)
    optimizer.zero_grad()
    assert not entered_of(state)
    steps(model, optimizer)
    strata.unwrap(model)
