"""When parameters are updated: modes that give the same bits, what each refuses, what is told."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import ConvNet, adamw, assert_same, batch, build, llama, tight, train
from strata._config.update_modes import parse_update
from strata._runtime.optimizer import complete_unit, current_groups
from strata._runtime.wrapped import Wrapped, wrapped
from torch import nn

IN_BACKWARD: dict[str, Any] = {"update": "in_backward"}
LOCK_FREE: dict[str, Any] = {"update": strata.LockFree(max_staleness=0)}
MODELS = {"llama": llama, "conv": ConvNet}


def trained(name: str, **more: Any) -> tuple[list[float], nn.Module]:
    """Losses of four steps, and the plain model that they lead to."""
    model, optimizer = tight(build(MODELS[name]), **more)
    losses = train(model, optimizer)
    return losses, strata.unwrap(model)


def accumulated(update: Any, **more: Any) -> nn.Module:
    """Three steps of two backward calls each."""
    model, optimizer = tight(build(llama), update=update, gradient_accumulation_steps=2, **more)
    torch.manual_seed(3)
    for _ in range(3):
        for _ in range(2):
            model(**batch(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return strata.unwrap(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_unit_norm", [None, 0.05])
@pytest.mark.parametrize("name", MODELS)
def test_exact_modes_give_the_same_bits(
    core: ModuleType, name: str, max_unit_norm: float | None, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"max_unit_norm": max_unit_norm, "dtype": dtype}
    losses, model = trained(name, **options)
    for mode in (IN_BACKWARD, LOCK_FREE):
        other_losses, other = trained(name, **options, **mode)
        assert other_losses == losses, mode
        assert_same(other, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_staleness_is_on_step_with_clipping_and_accumulation(
    core: ModuleType, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.1, "dtype": dtype}
    losses, model = trained("llama", **options)
    other_losses, other = trained("llama", **options, **LOCK_FREE)
    assert other_losses == losses
    assert_same(other, model)
    assert_same(accumulated(LOCK_FREE["update"], **options), accumulated("on_step", **options))


def test_every_unit_is_clipped_by_itself(core: ModuleType) -> None:
    plain = build(llama)
    inner = adamw(plain)
    model, optimizer = tight(build(llama), max_unit_norm=0.05)
    units = [list(plain.parameters())[u.params[0] : u.params[-1] + 1] for u in units_of(model)]
    clipped = 0
    for _ in range(3):
        torch.manual_seed(7)
        data = batch(plain)
        plain(**data).loss.backward()
        for params in units:
            clipped += bool(nn.utils.clip_grad_norm_(params, 0.05) > 0.05)
        inner.step()
        inner.zero_grad()
        model(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clipped > 0
    assert_same(model, plain, 1e-5)


class BothEnds(nn.Module):
    """Small layers ahead of the blocks and behind them, which share a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(128)
        self.after = nn.LayerNorm(128)
        self.blocks = nn.ModuleList([Pair() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = x + block(x)
        return self.after(x)


class Pair(nn.Module):
    """A block of which one parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 256)
        self.outer = nn.Linear(256, 128)
        self.unused = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def least_host(make: Any, tmp_path: Path, **options: Any) -> Any:
    """A wrapped model with the smallest host budget that is accepted."""
    for pages in range(1, 400):
        model = build(make)
        memory = {"device": "1MiB", "host": pages << 16, "ssd": "64MiB"}
        options |= {"memory": memory, "ssd_path": tmp_path, "page_size": "64KiB"}
        try:
            strata.plan(model, adamw(model), **options)
        except strata.StrataError:
            continue
        return tight(model, **options)
    raise AssertionError("no budget is accepted")


@pytest.mark.host_only  # on a device of its own other budgets hold
@pytest.mark.parametrize("max_unit_norm", [None, 0.05])
def test_small_layers_at_both_ends_train_in_the_smallest_budget(
    tmp_path: Path, max_unit_norm: float | None
) -> None:
    options: dict[str, Any] = {"max_unit_norm": max_unit_norm, "workers": 1}
    model, optimizer = least_host(BothEnds, tmp_path, **IN_BACKWARD, **options)
    other, other_optimizer = tight(build(BothEnds), **options)
    assert any("+" in unit.name for unit in units_of(model))
    for step in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
        for m, o in ((model, optimizer), (other, other_optimizer)):
            m(x).square().mean().backward()
            o.step()
            o.zero_grad()
    assert_same(strata.unwrap(model), other)


def test_what_a_used_gradient_belongs_to_is_not_read_again(core: ModuleType) -> None:
    """A parameter that is used once attached and once detached."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(48, 48)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for p in self.blocks[1].parameters():
                p.requires_grad_(False)
            x = self.blocks[1](self.blocks[0](x))
            for p in self.blocks[1].parameters():
                p.requires_grad_(True)
            out: torch.Tensor = self.blocks[2](self.blocks[1](x))
            return out

    model, _ = tight(build(Twice), **IN_BACKWARD)
    with pytest.raises(strata.StrataError, match=r"'blocks.1.0.weight' is needed again"):
        model(torch.randn(3, 48)).square().sum().backward()


def units_of(model: nn.Module) -> list[Any]:
    return wrapped(model).units


def test_a_staleness_within_its_bound_learns(core: ModuleType) -> None:
    lagging: dict[str, Any] = {"update": strata.LockFree(max_staleness=2), "max_grad_norm": 1.0}
    model, optimizer = tight(build(llama), **lagging)
    losses = [train(model, optimizer, steps=1)[0] for _ in range(16)]  # the same batch each time
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_is_read_under_lock_free_is_the_newest(core: ModuleType) -> None:
    model, optimizer = tight(build(llama), update=strata.LockFree(max_staleness=4))
    train(model, optimizer, 3)
    seen = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"]
    model.eval()
    torch.manual_seed(5)
    data = batch(model)
    with torch.no_grad():
        loss = model(**data).loss
    strata.synchronize(model)
    for name, value in model.state_dict().items():
        assert torch.equal(seen[name], value), name
    for key, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(moments[key]["exp_avg"], entry["exp_avg"])
    plain = strata.unwrap(model).to(loss.device)
    with torch.no_grad():
        assert torch.equal(plain(**data).loss, loss)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"])
@pytest.mark.parametrize("update", ["on_step", "in_backward"])
def test_lossy_moments_learn_nearly_the_same(
    core: ModuleType, state_dtype: Any, update: str
) -> None:
    losses, _ = trained("llama")
    lossy, _ = trained("llama", state_dtype=state_dtype, update=update)
    assert lossy[0] == losses[0]
    assert lossy == pytest.approx(losses, rel=0.05)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**IN_BACKWARD, "max_grad_norm": 1.0}, "max_grad_norm needs: pass max_unit_norm="),
    ({**IN_BACKWARD, "gradient_accumulation_steps": 2}, "2 backward.. calls could add up: pass"),
    ({**IN_BACKWARD, "skip_nonfinite": True}, "skip_nonfinite needs: pass update='on_step'"),
    ({"update": strata.LockFree(1), "skip_nonfinite": True}, r"pass LockFree\(max_staleness=0\)"),
    ({"max_grad_norm": 1.0, "max_unit_norm": 1.0}, "pass one of them"),
    ({"max_unit_norm": 0.0}, "max_unit_norm must be positive"),
    ({"max_unit_norm": "1"}, "max_unit_norm must be a number"),
    ({"update": "lock_free"}, r"'lock_free': did you mean strata.LockFree\(max_staleness=1\)"),
    ({"update": "on_stop"}, "did you mean 'on_step'"),
    ({"update": strata.LockFree}, r"update must be .* or strata.LockFree\(max_staleness=1\), not"),
    ({"state_dtype": torch.float16}, r"state_dtype 'torch.float16': did you mean 'torch.\w*float"),
    ({"state_dtype": "8 bit"}, "did you mean '8bit'"),
    ({"state_dtype": 8}, "state_dtype must be torch.float32, torch.bfloat16 or '8bit', not 8"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = build(llama)
    for function in (strata.wrap, strata.plan):
        with pytest.raises((TypeError, ValueError), match=message):
            function(model, adamw(model), **arguments)


def test_lossy_moments_of_an_optimizer_without_any_are_refused() -> None:
    model = build(llama)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"state_dtype='8bit'.*keeps none"):
        strata.plan(model, plain, state_dtype="8bit")
    strata.plan(model, plain, state_dtype=torch.float32)
    some = [
        {"params": [model.lm_head.weight]},
        {"params": model.model.parameters(), "momentum": 0.9},
    ]
    strata.plan(model, torch.optim.SGD(some, lr=0.1), state_dtype="8bit")


@pytest.mark.parametrize("steps", [-1, 1.5, True, "1"])
def test_a_staleness_is_a_number_of_steps(steps: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_staleness must be"):
        strata.LockFree(steps)


@pytest.mark.parametrize("steps", [65537, 2**31, 2**40])
def test_a_staleness_beyond_what_is_counted_is_refused_with_the_largest(steps: int) -> None:
    with pytest.raises(ValueError, match=f"65536 steps at most, not {steps}"):
        strata.LockFree(steps)
    with pytest.raises(ValueError, match="65536 steps at most"):
        parse_update(f"lock-free:{steps}")
    model = build(llama)
    strata.plan(model, adamw(model), update=strata.LockFree(65536))  # the core takes it


def test_a_mode_can_be_written_on_a_command_line() -> None:
    assert parse_update("on_step") == "on_step"
    assert parse_update("in_backward") == "in_backward"
    assert parse_update("lock-free") == strata.LockFree(max_staleness=1)
    assert parse_update("lock-free:0") == strata.LockFree(max_staleness=0)
    for text, message in (
        ("lock-free:", "number of steps"),
        ("lock-free:-1", "number of steps"),
        ("in-backward", "did you mean 'in_backward'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_update(text)


def backward(model: nn.Module) -> Wrapped:
    """One backward pass, every unit of which is completed."""
    model(**batch(model)).loss.backward()
    return wrapped(model)


def test_updates_of_one_backward_have_one_rate(core: ModuleType) -> None:
    model, optimizer = tight(build(llama), **IN_BACKWARD)
    state = backward(model)
    assert current_groups(state) is current_groups(state) is state.steps.groups_used
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        RuntimeError, match=r"lr of parameter group 0 .* from 0\.01 to 0\.5 between"
    ):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    optimizer.zero_grad()
    assert state.steps.groups_used is None
    optimizer.param_groups[0]["lr"] = 0.5  # behind step(): where schedulers change it
    backward(model)
    optimizer.step()


def test_gradients_that_were_used_cannot_be_dropped(core: ModuleType) -> None:
    model, optimizer = tight(build(llama), **IN_BACKWARD)
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(
        RuntimeError, match=r"zero_grad\(\) between backward.*in_backward.*step\(\)"
    ):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_a_unit_is_updated_when_it_is_complete(core: ModuleType) -> None:
    """Without the hooks: the calls that they make."""
    model, _ = tight(build(llama), **IN_BACKWARD)
    state = wrapped(model)
    unit = state.units[-1]
    before = [state.read(i) for i in unit.params]
    for i in unit.params:
        grad = torch.ones_like(before[i - unit.params[0]], device=state.device)
        state.session.land_gradient(i, grad.data_ptr(), "float32", stream=state.stream())
    complete_unit(state, unit)
    assert all(state.session.param_step(i) == 1 for i in unit.params)
    for i, old in zip(unit.params, before, strict=True):
        assert (state.read(i) < old).all()
    assert all(state.session.updated(i) for i in unit.params)
    with pytest.raises(strata.StrataError):
        state.session.drop_gradients()


def test_lock_free_tells_how_old_parameters_were(core: ModuleType) -> None:
    model, optimizer = tight(build(llama), update=strata.LockFree(max_staleness=2))
    train(model, optimizer, 4)
    made = strata.report(model)
    assert [lag.unit for lag in made.lags] == [unit.name for unit in units_of(model)]
    for lag in made.lags:
        assert len(lag.forwards) <= 3
        assert sum(lag.forwards) == 4
    assert "merged gradients" in str(made)
    exact, optimizer = tight(build(llama))
    train(exact, optimizer, 1)
    assert strata.report(exact).lags == []
    assert "merged" not in str(strata.report(exact))
