"""Dynamic loss scaling in float16, held against torch's own on float32 masters."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import ADAMW, adamw, assert_same, build, tight
from strata._runtime.wrapped import wrapped
from torch import nn

SCALING: dict[str, Any] = {"init_scale": 2.0**14, "growth_interval": 3}
QUIET, LOUD = 0, 1  # units


class Branches(nn.Module):
    """Two units side by side. The second one's gradients are large: only they ever overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(48, 48)) for _ in range(2)])

    def forward(self, x: torch.Tensor, loudness: float = 512.0) -> torch.Tensor:
        quiet, loud = self.branches
        y: torch.Tensor = quiet(x).tanh().float().mean() + loud(x * loudness).float().mean()
        return y


class Masters:
    """The oracle: torch's GradScaler and AdamW on float32 masters of a float16 model."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, **ADAMW, foreach=False)
        self.scaler = torch.amp.GradScaler("cpu", **SCALING)

    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
            p.grad = None
        self.scaler.step(self.inner)
        self.scaler.update()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master)


def branches() -> nn.Module:
    return build(Branches).half()


def data(step: int) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(step)).half()


def scaled_step(
    model: nn.Module, optimizer: Any, scaler: Any, x: torch.Tensor, **more: Any
) -> None:
    scaler.scale(model(x, **more)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", ["on_step", strata.LockFree(max_staleness=0)])
def test_it_is_as_torch_scales(core: ModuleType, update: Any) -> None:
    plain = branches()
    oracle = Masters(plain)
    model, optimizer = tight(branches(), update=update)
    scaler = strata.GradScaler("cpu", **SCALING)
    scales = []
    for step in range(20):
        oracle.scaler.scale(plain(data(step))).backward()
        oracle.step()
        scaled_step(model, optimizer, scaler, data(step))
        assert scaler.state_dict() == oracle.scaler.state_dict()
        scales.append(scaler.get_scale())
    assert any(b > a for a, b in pairwise(scales))
    assert any(b < a for a, b in pairwise(scales))
    state = wrapped(model)
    assert state.steps.skipped == state.steps.nonfinite == 20 - state.session.param_step(0) > 0
    for i, master in enumerate(oracle.masters):
        torch.testing.assert_close(state.read(i), master.detach(), rtol=1e-5, atol=1e-6)


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    strata.synchronize(model)
    state = wrapped(model)
    kinds: list[Any] = ["master", "moment1", "moment2"]
    return [state.read(i, kind) for i in range(len(state.params)) for kind in kinds]


def test_what_is_skipped_after_unscale_counts_as_well(core: ModuleType) -> None:
    counts = []
    for unscales in (False, True):
        model, optimizer = tight(branches())
        scaler = strata.GradScaler("cpu", init_scale=2.0**10)
        for loudness in (512.0, 16384.0, 512.0):
            before = everything(model, optimizer)
            scaler.scale(model(data(0), loudness=loudness)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                for p in model.parameters():  # the step is skipped all the same, as in torch
                    p.grad = torch.nan_to_num(p.grad, posinf=0.0, neginf=0.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            pairs = zip(before, everything(model, optimizer), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) == (loudness > 512.0)
        report = strata.report(model)
        counts.append((report.steps, report.steps_skipped, report.steps_nonfinite))
    assert counts == [(3, 1, 1)] * 2


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_an_overflow_in_one_unit_skips_the_step_in_all(
    core: ModuleType, gradient_accumulation_steps: int
) -> None:
    model, optimizer = tight(branches(), gradient_accumulation_steps=gradient_accumulation_steps)
    scaler = strata.GradScaler("cpu", init_scale=2.0**10)
    scaled_step(model, optimizer, scaler, data(0))
    before, entries = everything(model, optimizer), optimizer.state_dict()["state"]
    shown = {name: value.clone() for name, value in model.state_dict().items()}
    scaler.scale(model(data(1), loudness=16384.0)).backward()
    state = wrapped(model)
    grads = [[state.read(i, "grad") for i in state.units[u].params] for u in (QUIET, LOUD)]
    assert all(g.isfinite().all() for g in grads[QUIET])
    assert not all(g.isfinite().all() for g in grads[LOUD])
    scaler.step(optimizer)
    assert state.steps.last is not None
    assert state.steps.last["skipped"]
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**9
    for old, new in zip(before, everything(model, optimizer), strict=True):
        assert torch.equal(old, new)
    for name, value in model.state_dict().items():
        assert torch.equal(shown[name], value)
    for key, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["step"], entries[key]["step"])
    scaled_step(model, optimizer, scaler, data(2))
    assert all(state.session.param_step(i) == 2 for i in range(len(state.params)))
    assert state.steps.skipped == 1


def test_it_is_the_divided_gradients_that_are_clipped(core: ModuleType) -> None:
    results = []
    for scale in (1.0, 2.0**8):
        model, optimizer = tight(branches(), max_grad_norm=0.5)
        scaler = strata.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            scaled_step(model, optimizer, scaler, data(step))
        last = wrapped(model).steps.last
        assert last is not None
        results.append((last["norm"], strata.unwrap(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-2)
    assert_same(results[0][1], results[1][1], 1e-2)


def test_its_state_is_saved_and_loaded() -> None:
    scaler = strata.GradScaler("cpu", **SCALING)
    scaler.scale(torch.ones(1))
    saved = scaler.state_dict()
    other = strata.GradScaler("cpu", init_scale=1.0)
    other.load_state_dict(saved)
    assert other.get_scale() == 2.0**14
    assert other.state_dict() == saved


def test_it_scales_for_plain_optimizers_too() -> None:
    plain, other = build(Branches), build(Branches)
    for model, scaler in ((plain, torch.amp.GradScaler("cpu")), (other, strata.GradScaler("cpu"))):
        optimizer = adamw(model)
        scaler.scale(model(data(0).float())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert_same(plain, other)


def test_switched_off_it_does_nothing(core: ModuleType) -> None:
    model, optimizer = tight(build(Branches))
    scaler = strata.GradScaler("cpu", enabled=False)
    scaled_step(model, optimizer, scaler, data(0).float())
    assert wrapped(model).session.param_step(0) == 1


def test_what_it_cannot_do_is_refused(core: ModuleType) -> None:
    model, optimizer = tight(branches())
    scaler = strata.GradScaler("cpu")
    scaler.scale(model(data(0), loudness=1e-3)).backward()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


def test_the_one_of_torch_refuses_float16_as_ever(core: ModuleType) -> None:
    model, optimizer = tight(branches())
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(data(0))).backward()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match="FP16 gradients"):
            call(optimizer)


@pytest.mark.parametrize("update", ["in_backward", strata.LockFree(max_staleness=1)])
def test_modes_that_cannot_skip_are_refused(core: ModuleType, update: Any) -> None:
    model, optimizer = tight(branches(), update=update)
    scaler = strata.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(data(0))).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler .*update='on_step'"):
        scaler.step(optimizer)
