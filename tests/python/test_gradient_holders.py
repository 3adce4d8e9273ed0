"""Who has p.grad of a wrapped model, a view of it, or a tensor that was assigned to it: as long as
somebody has it, it is the gradient."""

from types import ModuleType
from typing import Any

import pytest
import torch
from gradient_models import WIDE, backward, both, grads, plain_net, same_gradients, sgd, weight
from small_models import assert_same, tight
from strata._runtime.grad_tensor import PagedGradient
from strata._runtime.wrapped import wrapped


def test_a_tensor_that_was_assigned_is_the_gradient(core: ModuleType) -> None:
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    for m in (model, plain):
        backward(m)
        mine = torch.full((WIDE, WIDE), 0.5)
        weight(m).grad = mine
        assert weight(m).grad is mine
        mine[0] = 2.0  # it is the same memory
    same_gradients(model, plain)
    both(lambda m: backward(m, 2), model, plain)
    assert float(weight(model).grad[0, 0]) != 2.0
    optimizer.step()
    sgd(plain).step()
    assert_same(model, plain)


def test_a_view_lives_as_long_as_somebody_has_it(core: ModuleType) -> None:
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    rows = []
    for m in (model, plain):
        backward(m)
        rows.append(weight(m).grad[3])
        weight(m).grad.mul_(2.0)
        weight(m).grad.clamp_(-0.5, 0.5)
    assert torch.equal(rows[0], rows[1])
    for row in rows:
        row.fill_(0.125)
    same_gradients(model, plain)
    held = wrapped(model).gradients._held
    assert len(held) == 1
    rows.clear()
    for p in model.parameters():  # others are held in its place, and are let go
        if p.grad is not None and p.dim():
            p.grad[0]
    assert len(held) <= 2
    same_gradients(model, plain)
    optimizer.step()
    sgd(plain).step()
    assert_same(model, plain)
    assert not held


def test_whoever_keeps_what_is_dropped_keeps_its_values(core: ModuleType) -> None:
    """As loops do that join the gradients of several losses."""
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    for m in (model, plain):
        backward(m, 1)
        first = grads(m)
        m.zero_grad()
        backward(m, 2)
        second = grads(m)
        for p in m.parameters():
            p.grad = None
        of_both = [a - 0.5 * b for a, b in zip(first, second, strict=True)]
        for p, joined in zip(
            [p for p in m.parameters() if p is not m.unused], of_both, strict=True
        ):
            p.grad = joined
    same_gradients(model, plain)
    optimizer.step()
    sgd(plain).step()
    assert_same(model, plain)


def test_the_object_is_one_and_knows_its_place(core: ModuleType) -> None:
    inner = plain_net()
    model, optimizer = tight(inner, sgd(inner))
    backward(model)
    grad = weight(model).grad
    assert isinstance(grad, PagedGradient)
    assert weight(model).grad is grad
    assert isinstance(grad.detach(), PagedGradient)
    assert grad.shape == (WIDE, WIDE)
    for call in (grad.data_ptr, grad.untyped_storage, lambda: torch.from_dlpack(grad)):
        with pytest.raises((RuntimeError, BufferError)):
            call()
    with pytest.raises(RuntimeError, match=r"p\.grad\.clone"):
        grad.requires_grad_()
    array = grad.numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    optimizer.step()
    assert grad.norm() > 0
    for look in (lambda: grad.sum(), lambda: weight(model).grad.clone()):
        with pytest.raises(RuntimeError, match=r"ahead of (optimizer\.)?step"):
            look()
    assert "used by optimizer.step" in repr(grad)
    optimizer.zero_grad()
    assert weight(model).grad is None
    with pytest.raises(RuntimeError, match="used by its update or forgotten"):
        grad.sum()


def test_what_cannot_be_the_gradient_is_refused(core: ModuleType) -> None:
    plain, inner = plain_net(), plain_net()
    model, _ = tight(inner, sgd(inner))
    wrong: list[Any] = [
        torch.ones(3), torch.ones(WIDE, WIDE, dtype=torch.float64), 5, [1.0],
        torch.ones(WIDE, WIDE, device="meta"),
    ]  # fmt: skip
    for value in wrong:
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            weight(plain).grad = value
        with pytest.raises(theirs.type):
            weight(model).grad = value
        assert weight(model).grad is None


def test_graphs_keep_the_values_of_their_moment(core: ModuleType) -> None:
    """A gradient in an operation that autograd saves."""
    plain, inner = plain_net(), plain_net()
    model, _ = tight(inner, sgd(inner))
    slopes = []
    for m in (model, plain):
        backward(m)
        x = torch.ones(WIDE, WIDE, requires_grad=True)
        loss = (x * weight(m).grad).sum() + (weight(m) * weight(m).grad).detach().sum()
        backward(m, 2) if m is model else None
        loss.backward()
        slopes.append(x.grad)
    assert torch.equal(slopes[0], slopes[1])


def test_what_somebody_has_is_the_gradient_over_a_step(core: ModuleType) -> None:
    """PyTorch applies it again in the next step, adds to it, and so does strata."""
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    kept = []
    for m, o in ((model, optimizer), (plain, sgd(plain))):
        backward(m)
        for p in m.parameters():
            if p.grad is not None:
                p.grad = p.grad.clone()
                kept.append((p.grad, p.grad.view(-1)))
        for _ in range(2):
            o.step()
        backward(m, 2)
        o.step()
    same_gradients(model, plain)
    assert_same(model, plain)
    half = len(kept) // 2
    for mine, other in zip(kept[:half], kept[half:], strict=True):
        assert torch.equal(mine[0], other[0])
