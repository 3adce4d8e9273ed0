"""Loops that look at p.grad, keep it, set it and drop it: over a plain model and a wrapped one."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from gradient_models import WIDE, backward, grads, plain_net, same_gradients, sgd, weight
from small_models import assert_same, tight
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through", ["model", "optimizer"])
def test_zero_grad(core: ModuleType, through: str, set_to_none: bool) -> None:
    """Where gradients become zeros, a parameter that a later backward leaves out has one of zeros:
    momentum goes on there."""

    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    def run(model: Any, optimizer: Any) -> None:
        for step in range(4):
            backward(model, step)
            if step % 2:
                model.blocks[2][0].bias.grad = None
            optimizer.step()
            (model if through == "model" else optimizer).zero_grad(set_to_none=set_to_none)
            if not set_to_none:
                assert all(not g.any() for g in grads(model))
            if step == 1:
                optimizer.step()  # with zeros, or with nothing

    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, momentum(inner))
    run(model, optimizer)
    run(plain, momentum(plain))
    same_gradients(model, plain)
    assert_same(model, plain, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grad_scaler(core: ModuleType, dtype: torch.dtype) -> None:
    """Unmodified, with clipping of what was unscaled, and steps that overflow."""

    def run(model: Any, optimizer: Any) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        told = []
        for step in range(6):
            x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step)).to(dtype)
            loss = model(x)
            scaler.scale(loss).backward()
            if step == 3:
                weight(model).grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 100.0)
            told.append((norm.isfinite().item(), scaler.get_scale()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return told

    plain, inner = plain_net(dtype), plain_net(dtype)
    model, optimizer = tight(inner, sgd(inner))
    assert run(model, optimizer) == run(plain, sgd(plain))
    if dtype is torch.float32:
        assert_same(model, plain, 1e-6)


def test_our_scaler_unscales_float16(core: ModuleType) -> None:
    results = []
    for unscales in (False, True):
        inner = plain_net(torch.float16)
        model, optimizer = tight(inner, sgd(inner))
        scaler = strata.GradScaler("cpu", init_scale=2.0**3)
        for step in range(2):
            x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step)).half()
            scaler.scale(model(x)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(strata.unwrap(model))
    assert_same(results[0], results[1], 1e-3)


def test_a_closure_is_called_by_step(core: ModuleType) -> None:
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    for m, o in ((model, optimizer), (plain, sgd(plain))):

        def closure(m: Any = m, o: Any = o) -> torch.Tensor:
            o.zero_grad()
            backward(m)
            clip_grad_value_(m.parameters(), 0.1)
            return torch.tensor(3.0)

        assert o.step(closure) == 3.0
    assert_same(model, plain)


def test_an_optimizer_of_torch_on_the_same_parameters(core: ModuleType) -> None:
    """Grafting: the direction is one optimizer's, the length another's."""

    def run(model: Any, optimizer: Any) -> None:
        other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for step in range(3):
            backward(model, step)
            before = [p.detach().clone() for p in model.parameters()]
            other.step()
            lengths = [(p - b).norm() for p, b in zip(model.parameters(), before, strict=True)]
            with torch.no_grad():
                for p, b, length in zip(model.parameters(), before, lengths, strict=True):
                    p.copy_(b)
                    if p.grad is not None:
                        p.grad.mul_(length / p.grad.norm().clamp(min=1e-6))
            optimizer.step()
            optimizer.zero_grad()

    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    run(model, optimizer)
    run(plain, sgd(plain))
    assert_same(model, plain, 1e-5)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_hooks_that_see_a_complete_gradient(core: ModuleType, place: str) -> None:
    """Registered ahead of wrap(), or behind it: they see the sum of all backwards, may change it,
    and may take it away."""

    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)
        seen.append(p.grad.norm().item())

    def drop(p: torch.Tensor) -> None:
        p.grad = None

    found = []
    for wraps in (True, False):
        seen: list[float] = []
        model = plain_net()
        optimizer = sgd(model)
        if place == "behind" and wraps:
            model, optimizer = tight(model, optimizer)
        weight(model).register_post_accumulate_grad_hook(hook)
        model.get_parameter("gain").register_post_accumulate_grad_hook(drop)
        if place == "before" and wraps:
            model, optimizer = tight(model, optimizer)
        for seed in range(3):
            backward(model, seed)
        assert model.get_parameter("gain").grad is None
        found.append((seen, weight(model).grad.clone(), model, optimizer))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.equal(found[0][1], found[1][1])
    same_gradients(found[0][2], found[1][2])
    for _, _, _, optimizer in found:
        optimizer.step()
    assert_same(found[0][2], found[1][2])


def test_logging_of_every_kind(core: ModuleType) -> None:
    plain, inner = plain_net(), plain_net()
    model, _ = tight(inner, sgd(inner))
    for m in (model, plain):
        backward(m)
    logs: list[Callable[[Any], torch.Tensor]] = [
        lambda m: torch.stack([p.grad.norm() for p in m.parameters() if p.grad is not None]).norm(),
        lambda m: torch.norm(torch.stack([torch.norm(g.detach(), 2.0) for g in grads(m)]), 2.0),
        lambda m: get_total_norm(grads(m)),
        lambda m: torch.tensor(sum(g.data.norm(2).item() ** 2 for g in grads(m)) ** 0.5),
        lambda m: torch.cat([g.view(-1) for g in grads(m)]).norm(),
        lambda m: nn.utils.parameters_to_vector(grads(m)).norm(),
    ]
    for log in logs:
        torch.testing.assert_close(log(model), log(plain), rtol=1e-6, atol=0)
    same_gradients(model, plain)


def test_a_second_thought_about_a_backward_that_was_interrupted(core: ModuleType) -> None:
    """model.zero_grad() clears up, as the optimizer's does."""

    def stop(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    seen: list[Any] = []
    handle = model.blocks[1].register_forward_hook(lambda m, args, out: seen.append(args[0]))
    loss = model(torch.randn(4, WIDE))
    handle.remove()
    seen[0].register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    model.zero_grad()
    assert not grads(model)
    for m, o in ((model, optimizer), (plain, sgd(plain))):
        backward(m)
        o.step()
    assert_same(model, plain)


# What cannot be -----------------------------------------------------------------------------------

MODES: dict[str, Any] = {"in_backward": "in_backward", "lock_free": strata.LockFree(1)}


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_use_gradients_early_refuse_by_name(core: ModuleType, mode: str) -> None:
    inner = plain_net()
    model, optimizer = tight(inner, sgd(inner), update=MODES[mode])
    assert weight(model).grad is None
    backward(model)
    grad = weight(model).grad
    assert grad.shape == (WIDE, WIDE)  # what it is can be seen
    refused: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: grad.mul_(2.0),
        lambda: grad.sum(),
        lambda: grad.zero_(),
        lambda: setattr(weight(model), "grad", torch.ones(WIDE, WIDE)),
        lambda: torch.amp.GradScaler("cpu").unscale_(optimizer),
    ]
    for call in refused[:-1]:
        with pytest.raises(RuntimeError, match=r"the gradient of .*update="):
            call()
    with pytest.raises(RuntimeError, match=r"cannot be dropped alone.*optimizer\.zero_grad"):
        model.zero_grad()
    with pytest.raises(RuntimeError, match=r"update='(on_step|in_backward)'"):
        backward(model)
    optimizer.step()
    model.zero_grad()
    assert weight(model).grad is None
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("when", ["backward", "step"])
@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("mode", [*MODES, "lock_free without staleness"])
def test_modes_that_use_gradients_early_have_no_zeros(
    core: ModuleType, mode: str, through: str, when: str
) -> None:
    """Momentum would go on with them where a later backward leaves a parameter out."""
    inner = plain_net()
    model, optimizer = tight(inner, sgd(inner), update=MODES.get(mode, strata.LockFree(0)))
    zeroed: Any = model if through == "model" else optimizer
    zeroed.zero_grad(set_to_none=False)  # there is nothing to become zero
    backward(model)
    if when == "step":
        optimizer.step()
    advice = "cannot be zeroed.*"
    if through == "optimizer":
        advice += "set_to_none=True.*update='on_step'"
        if mode == "in_backward" and when == "backward":
            advice = "some of the parameters already"
    with pytest.raises(RuntimeError, match=advice):
        zeroed.zero_grad(set_to_none=False)
    if when == "backward":
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_frozen_parameter_has_none(core: ModuleType) -> None:
    inner = plain_net()
    weight(inner).requires_grad_(False)
    model, _ = tight(inner, torch.optim.SGD([p for p in inner.parameters() if p.requires_grad]))
    backward(model)
    assert weight(model).grad is None
    with pytest.raises(RuntimeError, match="not trained"):
        weight(model).grad = torch.ones(WIDE, WIDE)


def test_a_forward_may_look_at_gradients(core: ModuleType) -> None:
    """Those of the step before, or of an earlier backward; what it has entered stays so."""
    found = []
    for wraps in (True, False):
        model: Any = plain_net()
        seen: list[Any] = []

        def look(*_: Any, model: Any = model, seen: list[Any] = seen) -> None:
            grad = model.blocks[0][0].bias.grad
            seen.append(None if grad is None else (grad.norm().item(), grad.clone()))

        if wraps:
            model, _ = tight(model, sgd(model))
        model.blocks[1].register_forward_hook(look)
        for seed in range(3):
            backward(model, seed)
        found.append((seen, model))
    (ours, model), (theirs, plain) = found
    assert ours[0] is theirs[0] is None
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6)
        assert torch.equal(a[1], b[1])
    same_gradients(model, plain)


def sharpness_aware(model: Any, optimizer: Any, step: int) -> None:
    """Gradients at a place nearby, applied here."""
    backward(model, step)
    with torch.no_grad():
        norm = torch.stack([g.norm(2) for g in grads(model)]).norm(2)
        there = []
        for p in model.parameters():
            if p.grad is not None:
                there.append((p, p.detach().clone()))
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
    optimizer.zero_grad()
    backward(model, step)
    for p, here in there:
        p.data = here
    optimizer.step()
    optimizer.zero_grad()


def noisy(model: Any, optimizer: Any, step: int) -> None:
    torch.manual_seed(step)
    backward(model, step)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
    optimizer.step()
    optimizer.zero_grad()


def amplified(model: Any, optimizer: Any, step: int) -> None:
    """Slow gradients are made stronger: a mean over steps, which is kept as copies."""
    backward(model, step)
    for name, p in model.named_parameters():
        if p.grad is not None:
            before = means.get((id(model), name), p.grad.detach().clone())
            means[id(model), name] = before * 0.9 + p.grad.data.detach() * 0.1
            p.grad.data = p.grad.data + means[id(model), name] * 2
    optimizer.step()
    optimizer.zero_grad()


def surgery(model: Any, optimizer: Any, step: int) -> None:
    """Of two losses: what is against the other is taken out."""
    both: list[list[torch.Tensor]] = []
    for seed in (step, step + 100):
        optimizer.zero_grad()
        backward(model, seed)
        both.append([g.clone() for g in grads(model)])
    for p, a, b in zip([p for p in model.parameters() if p.grad is not None], *both, strict=True):
        along = (a * b).sum()
        p.grad = a + b if along > 0 else a + b - along / b.square().sum().clamp(min=1e-12) * b
    optimizer.step()


means: dict[tuple[int, str], torch.Tensor] = {}


@pytest.mark.parametrize("loop", [sharpness_aware, noisy, amplified, surgery])
def test_published_tricks(core: ModuleType, loop: Callable[[Any, Any, int], None]) -> None:
    plain, inner = plain_net(), plain_net()
    model, optimizer = tight(inner, sgd(inner))
    for m, o in ((model, optimizer), (plain, sgd(plain))):
        for step in range(4):
            loop(m, o, step)
    assert_same(model, plain, 1e-6)
