"""Gradients that are old: those that step() has used, and those from before wrap()."""

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from gradient_models import WIDE, backward, plain_net, sgd, weight
from small_models import assert_same, tight
from torch import nn


@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("some", [False, True])
def test_a_second_step_with_the_same_gradients_is_refused(
    core: ModuleType, some: bool, through: str
) -> None:
    """Plain PyTorch would use them again. Some: others come anew in between."""
    inner = plain_net()
    model, optimizer = tight(inner, sgd(inner))
    backward(model)
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if some:
        weight(model).grad = None
        model.blocks[1][0].weight.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) after step\(\) without zero_grad\(\)"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    (model if through == "model" else optimizer).zero_grad()
    optimizer.step()  # with nothing
    backward(model)
    optimizer.step()


def test_a_second_step_without_old_gradients(core: ModuleType) -> None:
    """What is nobody's old gradient is used: a tensor that the loop keeps, others in each step."""

    def run(model: Any, optimizer: Any) -> None:
        kept = torch.ones(WIDE)
        for block in model.blocks:
            block[0].bias.grad = kept
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
            block[0].weight.square().sum().backward()
            optimizer.step()
            for p in block.parameters():
                p.grad = None

    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    run(model, optimizer)
    run(plain, sgd(plain))
    assert_same(model, plain, 1e-6)


@pytest.mark.parametrize("update", ["in_backward", strata.LockFree(1)], ids=str)
def test_a_step_may_follow_another_where_updates_run_in_the_backward(
    core: ModuleType, update: Any
) -> None:
    """As after Ctrl-C, when nobody knows whether step() was over."""
    inner = plain_net()
    model, optimizer = tight(inner, sgd(inner), update=update)
    backward(model)
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


# From before wrap() -------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["on_step", "in_backward", strata.LockFree(0)], ids=str)
def test_gradients_from_before_wrap_are_dropped(
    core: ModuleType, update: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing adds to them, and no step uses them: as if zero_grad() had come ahead of wrap()."""
    plain, inner = plain_net(), plain_net()
    inner.blocks[0].requires_grad_(False)
    plain.blocks[0].requires_grad_(False)
    for m in (plain, inner):
        backward(m)
        m.blocks[0][0].bias.grad = torch.ones(WIDE)  # of a frozen one
        m.unused.grad = torch.ones(5)  # no backward replaces it
    old = [weakref.ref(p.grad) for p in inner.parameters() if p.grad is not None]
    model, optimizer = tight(inner, sgd(inner), update=update)
    assert f"dropped {len(old)} gradients that parameters had before strata.wrap()" in caplog.text
    gc.collect()
    assert not any(grad() is not None for grad in old)
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()  # with nothing
    plain.zero_grad()
    for m, o in ((model, optimizer), (plain, sgd(plain))):
        for step in range(2):
            backward(m, step)
            o.step()
            o.zero_grad()
    assert_same(model, plain)
    assert all(p.grad is None for p in strata.unwrap(model).parameters())


def test_gradients_of_a_layer_that_is_cut_into_tiles_are_dropped() -> None:
    model = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64))
    model(torch.ones(2, 64)).sum().backward()
    memory = {"device": "448KiB", "host": "64MiB"}
    model, _ = strata.wrap(model, sgd(model), memory=memory, page_size="64KiB", activations=None)
    assert any(isinstance(module, strata.nn.TiledLinear) for module in model.modules())
    assert all(p.grad is None for p in strata.unwrap(model).parameters())


def test_a_failed_wrap_and_a_plan_leave_gradients_where_they_are(
    core: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_net()
    backward(model)
    before = [p.grad for p in model.parameters()]
    strata.plan(model, sgd(model))
    with pytest.raises(FileNotFoundError):
        tight(model, sgd(model), weights="nowhere")
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert "dropped" not in caplog.text
