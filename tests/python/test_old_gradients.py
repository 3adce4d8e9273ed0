"""Gradients that are old: those that step() has used."""

from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from gradient_models import WIDE, backward, plain_net, sgd, weight
from small_models import assert_same, tight


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
