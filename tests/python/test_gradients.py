"""Gradients of a wrapped model add up, and are clipped and scaled, as plain PyTorch's: to the bit,
wherever they rest, and without a look at their values where sums tell enough."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from gradient_models import (
    DTYPES,
    TIERS,
    backward,
    both,
    grads,
    plain_net,
    same_gradients,
    sgd,
    weight,
    wrapped_net,
)  # fmt: skip
from small_models import assert_same
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

# Backwards that add up ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_backwards_add_up_in_the_dtype_of_gradients(
    tier: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = plain_net(dtype)
    model, optimizer = wrapped_net(tier, tmp_path, dtype)
    other = sgd(plain)
    for step in range(3):
        for i in range(step + 1):
            backward(model, seed=10 * step + i)
            backward(plain, seed=10 * step + i)
            same_gradients(model, plain)
        optimizer.step()
        other.step()
        model.zero_grad()
        other.zero_grad()
        same_gradients(model, plain)
        if dtype is not torch.float32:
            plain.load_state_dict(model.state_dict())  # masters are float32 here
        else:
            assert_same(model, plain)


def test_declared_sums_are_float32_and_the_last_window_may_be_short(tmp_path: Path) -> None:
    model, optimizer = wrapped_net("host", tmp_path, torch.bfloat16, gradient_accumulation_steps=3)
    plain = plain_net(torch.bfloat16)
    for window in (3, 3, 1):
        sums: dict[str, Any] = {}
        for i in range(window):
            backward(model, seed=i)
            plain.zero_grad()
            plain.load_state_dict(model.state_dict())
            backward(plain, seed=i)
            for name, p in plain.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, 0) + p.grad.float()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (name not in sums)
            if p.grad is not None:
                assert p.grad.dtype == torch.float32
                assert torch.equal(p.grad.clone(), sums[name])
                assert p.grad.norm() == pytest.approx(sums[name].norm().item(), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()


def test_a_lent_gradient_is_added_to_where_it_lies(tmp_path: Path) -> None:
    plain = plain_net()
    model, _ = wrapped_net("host", tmp_path)
    for seed in range(3):
        backward(model, seed)
        backward(plain, seed)
    both(lambda m: [g.mul_(0.3) for g in grads(m)], model, plain)
    both(lambda m: backward(m, 7), model, plain)


# Clipping and scaling: nothing moves --------------------------------------------------------------


def moves(model: nn.Module) -> Any:
    """What crosses links, and how often gradients were read."""
    state = wrapped(model)
    stats: dict[str, Any] = dict(state.session.stats())
    return {k: v for k, v in stats.items() if "bytes" in k}


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is looked at, or written."""
    from strata._runtime.gradients import Gradients

    def read(self: Any, index: int, *args: Any) -> None:
        raise AssertionError(f"the values of {self.name(index)} were asked for")

    monkeypatch.setattr(Gradients, "open", read)
    monkeypatch.setattr(Gradients, "_replace", read)


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_clip_grad_norm_needs_no_values(
    tier: str, dtype: torch.dtype, foreach: bool | None, tmp_path: Path
) -> None:
    plain = plain_net(dtype)
    model, _ = wrapped_net(tier, tmp_path, dtype)
    backward(model)
    backward(plain)
    wrapped(model).synchronize()
    before = moves(model)
    ours, theirs = (clip_grad_norm_(m.parameters(), 0.5, foreach=foreach) for m in (model, plain))
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert moves(model) == before


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_what_was_unscaled_is_clipped_where_it_rests(
    tier: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of plain PyTorch; the update clips, and what it clips was unscaled and rounded."""
    plain = plain_net(dtype)
    model, optimizer = wrapped_net(tier, tmp_path, dtype)
    other = sgd(plain)
    for m, o in ((model, optimizer), (plain, other)):
        backward(m)
        scaler = torch.amp.GradScaler("cpu", init_scale=700.0)
        scaler.scale(torch.ones(1))
        scaler.unscale_(o)
        clip_grads_with_norm_(m.parameters(), 0.5, torch.tensor(3.0))
    ours, theirs = (get_total_norm(grads(m)) for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)
    monkeypatch.undo()
    same_gradients(model, plain)
    optimizer.step()
    other.step()
    if dtype is torch.float32:
        assert_same(model, plain)


def test_norms_do_not_drift_from_what_is_scaled_often(tmp_path: Path) -> None:
    """Each rounding is in the norm, except the last one."""
    plain = plain_net(torch.bfloat16)
    model, _ = wrapped_net("host", tmp_path, torch.bfloat16)
    for m in (model, plain):
        backward(m)
        weight(m).grad.fill_(1.0)
        for _ in range(40):
            weight(m).grad.mul_(0.9)
    same_gradients(model, plain)
    ours, theirs = (weight(m).grad.norm() for m in (model, plain))
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_what_was_scaled_is_what_torch_makes_of_it(
    tier: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Read, added to, and used by an update."""
    plain = plain_net(dtype)
    model, optimizer = wrapped_net(tier, tmp_path, dtype)
    backward(model)
    backward(plain)
    factors = [0.3, torch.tensor(1 / 7), torch.tensor(0.1, dtype=torch.float64), 3, 7e-3]
    for factor in factors:
        both(lambda m, c=factor: [g.mul_(c) for g in grads(m)], model, plain)  # type: ignore[misc]
        both(lambda m, c=factor: [g.div_(c) for g in grads(m)], model, plain)  # type: ignore[misc]
    for factor in factors:
        both(lambda m, c=factor: torch._foreach_mul_(grads(m), c), model, plain)  # type: ignore[misc]
        both(lambda m, c=factor: torch._foreach_div_(grads(m), c), model, plain)  # type: ignore[misc]
        each = [factor] * len(grads(model))
        both(lambda m, c=each: torch._foreach_mul_(grads(m), c), model, plain)  # type: ignore[misc]
    both(lambda m: backward(m, 2), model, plain)

    def in_place(m: nn.Module) -> None:
        for p in m.parameters():
            if p.grad is not None:
                p.grad *= 0.7
                p.grad /= 3

    both(in_place, model, plain)
    optimizer.step()
    sgd(plain).step()
    if dtype is torch.float32:
        assert_same(model, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["sgd", "nadam"])
def test_the_update_scales_as_if_it_had_been_written(
    rule: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One model's gradients are scaled by notes, another's on their values; a class without a
    kernel reads them as float32."""
    results = []
    for noted in (True, False):
        inner = plain_net(dtype)
        make: Any = {"sgd": torch.optim.SGD, "nadam": torch.optim.NAdam}[rule]
        memory = {"device": "16MiB", "host": "64MiB"}
        model, optimizer = strata.wrap(
            inner, make(inner.parameters(), lr=0.01), memory=memory, activations=None
        )
        for step in range(3):
            backward(model, step)
            for p in model.parameters():
                if p.grad is not None and noted:
                    p.grad.mul_(0.3).div_(0.7)
                elif p.grad is not None:
                    p.grad = p.grad.clone().mul_(0.3).div_(0.7)
            optimizer.step()
            optimizer.zero_grad()
        results.append(strata.unwrap(model))
    assert_same(results[0], results[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_by_a_norm_that_is_no_number(bad: float, tmp_path: Path) -> None:
    plain = plain_net()
    model, _ = wrapped_net("host", tmp_path)
    for m in (model, plain):
        backward(m)
        weight(m).grad[3, 4] = bad
    ours, theirs = (clip_grad_norm_(m.parameters(), 1.0) for m in (model, plain))
    assert torch.equal(ours, theirs) or (ours.isnan() and theirs.isnan())
    for mine, other in zip(grads(model), grads(plain), strict=True):
        assert torch.equal(mine.clone().isnan(), other.isnan())
        assert torch.equal(mine.clone().nan_to_num(), other.nan_to_num())
        assert torch.equal(torch.isfinite(mine), torch.isfinite(other))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_small_and_large_numbers_are_scaled_on_their_values(tmp_path: Path) -> None:
    """Rounding makes them zero or infinite, which no sum of squares tells."""
    for dtype, factor in ((torch.float16, 1e-5), (torch.float16, 1e5), (torch.bfloat16, 1e38)):
        plain = plain_net(dtype)
        model, _ = wrapped_net("host", tmp_path, dtype)
        backward(model)
        backward(plain)
        both(lambda m, c=factor: [g.mul_(c) for g in grads(m)], model, plain)  # type: ignore[misc]
        for mine, other in zip(grads(model), grads(plain), strict=True):
            torch.testing.assert_close(mine.norm(), other.norm(), rtol=2e-3, atol=0)
            assert torch.equal(torch.isinf(mine), torch.isinf(other))


NORMS: dict[str, Callable[[Any], torch.Tensor]] = {
    "method": lambda g: g.norm(),
    "two": lambda g: g.norm(2),
    "data": lambda g: g.detach().data.norm(2.0),
    "torch": torch.norm,
    "vector": lambda g: torch.linalg.vector_norm(g),
    "linalg": lambda g: torch.linalg.norm(g),
    "dtype": lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
    "float": lambda g: g.float().norm(),
    "foreach": lambda g: torch._foreach_norm([g])[0],
    "one": lambda g: g.norm(1),
    "inf": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "zero": lambda g: torch.linalg.vector_norm(g, 0),
    "rows": lambda g: g.norm(dim=-1) if g.dim() else g.norm(),
    "kept": lambda g: torch.linalg.vector_norm(g, keepdim=True),
    "nuclear": lambda g: torch.linalg.norm(g.float(), 2) if g.dim() == 2 else g.norm(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, scaled: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    plain = plain_net(dtype)
    model, _ = wrapped_net("host", tmp_path, dtype)
    for m in (model, plain):
        backward(m)
        for g in grads(m) if scaled else []:
            g.mul_(0.3)
    for mine, other in zip(grads(model), grads(plain), strict=True):
        ours, theirs = NORMS[name](mine), NORMS[name](other)
        assert ours.dtype == theirs.dtype
        eps = torch.finfo(theirs.dtype if theirs.dtype is not torch.float64 else torch.float32).eps
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=0)
