"""Optimizers without a kernel, run as their own classes on slices of parameters; and Lion."""

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build
from strata._optim.foreign import Foreign, make_foreign
from strata._optim.foreign_probe import probe
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.optim import Optimizer
from variants import thorough

Rule = Callable[[Any], Optimizer]

RULES: dict[str, Rule] = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.1),
    "RMSprop with momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, maximize=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=True),
}


def make() -> nn.Module:
    """Parameters of which some lie on several pages, and of odd sizes."""
    return nn.Sequential(
        nn.Linear(37, 701),
        nn.Tanh(),
        nn.Sequential(nn.Linear(701, 61), nn.Tanh()),
        nn.Linear(61, 5),
    )


def batches(count: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(9)
    for _ in range(count):
        yield torch.randn(6, 37, generator=random)


def train(model: nn.Module, optimizer: Any, count: int = 10) -> None:
    for batch in batches(count):
        (model(batch) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ssd(
    model: nn.Module, optimizer: Optimizer, path: Path, **more: Any
) -> tuple[nn.Module, Any]:
    """Wrapped so that the state of the optimizer rests on the SSD."""
    memory = {"device": "512KiB", "host": "1MiB", "ssd": "16MiB"}
    return strata.wrap(
        model, optimizer, memory=memory, ssd_path=path, page_size="64KiB", activations=None, **more
    )


@pytest.mark.parametrize("rule", RULES)
def test_same_as_plain(core: ModuleType, rule: str, tmp_path: Path) -> None:
    plain, inner = build(make), build(make)
    train(plain, RULES[rule](plain.parameters()))
    model, optimizer = on_ssd(inner, RULES[rule](inner.parameters()), tmp_path)
    train(model, optimizer)
    assert_same(model, plain, 0.0)


def test_state_rests_on_the_ssd(tmp_path: Path) -> None:
    model = build(make)
    model, _ = on_ssd(model, RULES["Adamax"](model.parameters()), tmp_path)
    assert {unit["state_tier"] for unit in wrapped(model).session.plan["units"]} != {"host"}


def test_schedules_and_groups(core: ModuleType, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> Optimizer:
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": weights, "momentum": 0.9}, {"params": biases, "weight_decay": 0.1}]
        return torch.optim.RMSprop(groups, lr=1e-2)

    plain, inner = build(make), build(make)
    reference = optimizer_of(plain)
    model, optimizer = on_ssd(inner, optimizer_of(inner), tmp_path)
    for m, o in ((plain, reference), (model, optimizer)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
        for batch in batches(5):
            m(batch).square().sum().backward()
            o.step()
            schedule.step()
            o.zero_grad()
    assert_same(model, plain, 0.0)


@pytest.mark.parametrize("rule", ["NAdam", "RMSprop with momentum"])
def test_state_dict_round_trip(core: ModuleType, rule: str, tmp_path: Path) -> None:
    plain, inner = build(make), build(make)
    reference = RULES[rule](plain.parameters())
    model, optimizer = on_ssd(inner, RULES[rule](inner.parameters()), tmp_path)
    train(plain, reference, 3)
    train(model, optimizer, 3)
    expected, saved = reference.state_dict()["state"], optimizer.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for number, entry in expected.items():
        assert saved[number].keys() == entry.keys()
        for name, value in entry.items():
            assert torch.equal(saved[number][name], value), name
    # Another one goes on from what torch saved.
    other = build(make)
    other.load_state_dict(plain.state_dict())
    other, continued = on_ssd(other, RULES[rule](other.parameters()), tmp_path)
    continued.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(plain, reference, 2)
    train(other, continued, 2)
    assert_same(other, plain, 0.0)


@pytest.mark.parametrize("rule", ["NAdam", "RMSprop"])
def test_checkpoints(tmp_path: Path, rule: str) -> None:
    plain, first = build(make), build(make)
    train(plain, RULES[rule](plain.parameters()), 3)
    model, optimizer = on_ssd(first, RULES[rule](first.parameters()), tmp_path)
    train(model, optimizer, 3)
    strata.save(model, tmp_path / "checkpoint")
    train(model, optimizer, 2)
    second = build(make)
    again, continued = on_ssd(second, RULES[rule](second.parameters()), tmp_path)
    strata.load(again, tmp_path / "checkpoint")
    train(again, continued, 2)
    assert_same(strata.unwrap(again), strata.unwrap(model), 0.0)


class Unlucky(torch.optim.RMSprop):
    """Fails, but not while it is tried."""

    luck = True

    def step(self, closure: Any = None) -> Any:
        if not Unlucky.luck:
            raise RuntimeError("out of luck")
        return super().step(closure)


def test_an_exception_ends_the_session(
    core: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(make)
    model, optimizer = on_ssd(model, Unlucky(model.parameters()), tmp_path)
    train(model, optimizer, 2)
    monkeypatch.setattr(Unlucky, "luck", False)
    with pytest.raises(strata.StrataError, match="RuntimeError: out of luck"):
        train(model, optimizer, 2)


def test_torch_keeps_its_threads() -> None:
    seen = []

    class Looks(torch.optim.RMSprop):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.get_num_threads())
            return super().step(closure)

    optimizer = Looks([nn.Parameter(torch.ones(3))])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        foreign = Foreign(optimizer)
        seen.clear()
        foreign.seconds_per_element(optimizer.param_groups[0])
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_more_state_than_laid_out(core: ModuleType, tmp_path: Path) -> None:
    model = build(make)
    model, optimizer = on_ssd(model, RULES["RMSprop"](model.parameters()), tmp_path)
    optimizer.param_groups[0]["momentum"] = 0.5
    model(next(batches(1))).sum().backward()
    with pytest.raises(ValueError, match="momentum_buffer"):
        optimizer.step()


class Bare(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Normalized(Bare):
    """An element's update depends on all the others."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm())


class Noisy(Bare):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(torch.rand_like(parameter))


class CountsInGroup(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] += 1


class CountsOnItself(Bare):
    """What is in no state cannot be restored."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / self.steps)


class KeepsMean(Bare):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = parameter.grad.mean()


class KeepsDouble(Bare):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = parameter.grad.double()


REFUSED: dict[str, tuple[Rule, str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS .*closure"),
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.1), "Muon .*part of a parameter"),
    "Adafactor": (torch.optim.Adafactor, "Adafactor .*'row_var'"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam .*dense gradients"),
    "three moments": (
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        "RMSprop .*keeps 3 values .*'grad_avg'",
    ),
    "norm of the whole": (Normalized, "Normalized .*depends on other elements"),
    "random numbers": (Noisy, "Noisy .*depends on other elements"),
    "state in the group": (CountsInGroup, "CountsInGroup .*'steps'"),
    "state on itself": (CountsOnItself, "CountsOnItself .*not in its state"),
    "scalar of the values": (KeepsMean, "KeepsMean .*'mean'"),
    "state of another dtype": (KeepsDouble, "KeepsDouble .*float64"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str) -> None:
    rule, message = REFUSED[what]
    parameters = [nn.Parameter(torch.ones(8, 8))]
    with pytest.raises(TypeError, match=message):
        make_foreign(rule(parameters))


def test_wrap_refuses_before_it_changes_anything(core: ModuleType) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="LBFGS"):
        strata.wrap(model, torch.optim.LBFGS(model.parameters()))
    strata.wrap(model, torch.optim.SGD(model.parameters()))


def test_lossy_state_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="RMSprop"):
        strata.wrap(model, torch.optim.RMSprop(model.parameters()), state_dtype=torch.bfloat16)


def test_native_ones_are_not_foreign() -> None:
    p = [nn.Parameter(torch.ones(3))]
    for rule in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, strata.Lion):
        assert make_foreign(rule(p)) is None
    # A class derived from one may do anything.
    assert make_foreign(Derived(p)) is not None


class Derived(torch.optim.SGD):
    pass


def test_what_is_kept() -> None:
    p = [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.NAdam(p)
    kept = probe(optimizer, optimizer.param_groups[0])
    assert kept.moments == ("exp_avg", "exp_avg_sq")
    assert kept.scalars == ("step", "mu_product")
    assert not optimizer.state


def test_hyperparameters_are_numbered_by_value() -> None:
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.ones(3))], lr=0.1)
    foreign = Foreign(optimizer)
    group = optimizer.param_groups[0]
    first = foreign.remember(group)
    group["lr"] = 0.1 + 1e-16
    second = foreign.remember(group)
    assert first != second
    group["lr"] = 0.1
    assert foreign.remember(group) == first


def test_scalars_are_found_again() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([p])
    foreign = Foreign(optimizer)
    for step in range(1, 8):
        p.grad = torch.ones(3)
        optimizer.step()
        found = foreign.scalars(0, step, optimizer.param_groups[0])
        for name in ("step", "mu_product"):
            assert torch.equal(found[name], optimizer.state[p][name])


def test_the_cost_is_said(core: ModuleType, caplog: Any, tmp_path: Path) -> None:
    model = build(make)
    with caplog.at_level(logging.WARNING, "strata"):
        on_ssd(model, RULES["Adamax"](model.parameters()), tmp_path)
    said = [r.getMessage() for r in caplog.records if "Adamax" in r.getMessage()]
    assert len(said) == 1
    assert "slower" in said[0]


LEAVES_AT_ONCE = """
import sys
import torch, strata
from strata._runtime import closing
model = torch.nn.Linear(512, 512)
model, optimizer = strata.wrap(model, torch.optim.RMSprop(model.parameters()), activations=None)
model(torch.ones(2, 512)).sum().backward()
optimizer.step()
if sys.argv[1] == "forgotten":
    closing._open.clear()  # nobody closes it
    del model.__dict__["_strata"], optimizer, model
"""


@pytest.mark.parametrize("how", ["open", thorough("forgotten")])
def test_a_program_may_end_in_the_middle(how: str) -> None:
    subprocess.run([sys.executable, "-c", LEAVES_AT_ONCE, how], check=True, timeout=300)


def lion(p: Any, **more: Any) -> Optimizer:
    return strata.Lion(p, lr=1e-3, weight_decay=0.1, **more)


def test_lion_by_its_formula() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = strata.Lion([p], lr=0.1, betas=(0.5, 0.75), weight_decay=0.2)
    mean, value = torch.zeros(3, dtype=torch.float64), p.detach().clone()
    for grad in ([1.0, -1.0, 0.0], [-3.0, 0.5, 2.0]):
        p.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        value = value * (1 - 0.1 * 0.2) - 0.1 * torch.sign(0.5 * mean + 0.5 * p.grad)
        mean = 0.75 * mean + 0.25 * p.grad
        torch.testing.assert_close(p.detach(), value)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], mean)


def test_lion_refuses_nonsense() -> None:
    p = [nn.Parameter(torch.ones(3))]
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            strata.Lion(p, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["lion", "adagrad"])
def test_rules_with_one_moment(core: ModuleType, rule: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> Optimizer:
        if rule == "lion":
            return lion(model.parameters())
        return torch.optim.Adagrad(
            model.parameters(), lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.2
        )

    plain, inner = build(make), build(make)
    reference = optimizer_of(plain)
    train(plain, reference)
    model, optimizer = on_ssd(inner, optimizer_of(inner), tmp_path)
    train(model, optimizer)
    saved = optimizer.state_dict()["state"][0]
    assert set(saved) - {"step"} == {"exp_avg" if rule == "lion" else "sum"}
    assert_same(model, plain, 1e-6)
