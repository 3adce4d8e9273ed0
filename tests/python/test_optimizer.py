"""The optimizer that wrap() returns: rules, groups, schedulers, state."""

import copy
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import adamw, assert_same, build, tight
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3)])


def steps(model: nn.Module, optimizer: Any, scheduler: Any = None, count: int = 4) -> None:
    torch.manual_seed(2)
    for _ in range(count):
        loss = (model(torch.randn(4, 48)) - 1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.2),
    "adamw maximize": lambda p: AdamW(p, lr=1e-3, eps=1e-4, maximize=True),
    "adam with L2": lambda p: Adam(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "adam decoupled": lambda p: Adam(
        p, lr=1e-2, eps=1e-4, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "sgd": lambda p: SGD(p, lr=1e-3),
    "sgd with momentum": lambda p: SGD(p, lr=1e-3, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd with nesterov": lambda p: SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "tensor lr": lambda p: AdamW(p, lr=torch.tensor(1e-2), eps=1e-4),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(core: ModuleType, rule: str) -> None:
    plain = build(make)
    steps(plain, RULES[rule](plain.parameters()))
    inner = build(make)
    model, optimizer = tight(inner, RULES[rule](inner.parameters()))
    steps(model, optimizer)
    assert_same(model, plain, 1e-5)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 3e-2},
    ]


def test_parameter_groups_and_changed_hyperparameters(core: ModuleType) -> None:
    plain, model = build(make), build(make)
    inner = AdamW(groups(plain), lr=1e-2, eps=1e-4)
    model, optimizer = tight(model, AdamW(groups(model), lr=1e-2, eps=1e-4))
    for o, m in ((inner, plain), (optimizer, model)):
        steps(m, o, count=2)
        o.param_groups[0]["lr"] = 5e-2
        o.param_groups[1]["weight_decay"] = 0.5
        steps(m, o, count=2)
    assert_same(model, plain, 1e-5)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=6),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("built_on", ["inner", "returned"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(core: ModuleType, name: str, built_on: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it thinks that step() was left out
        if name == "sequential":
            warnings.simplefilter("ignore", UserWarning)
        plain = build(make)
        reference = adamw(plain)
        steps(plain, reference, SCHEDULERS[name](reference))
        model = build(make)
        inner = adamw(model)
        scheduler = SCHEDULERS[name](inner) if built_on == "inner" else None
        model, optimizer = tight(model, inner)
        steps(model, optimizer, scheduler or SCHEDULERS[name](optimizer))
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
    assert_same(model, plain, 1e-5)


def test_closure_and_hooks(core: ModuleType) -> None:
    model, optimizer = tight(build(make))
    assert isinstance(optimizer, torch.optim.Optimizer)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 48)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert len(called) == 2


@pytest.mark.parametrize("registered_on", ["ahead", "inner", "returned"])
def test_hooks_of_the_optimizer(core: ModuleType, registered_on: str) -> None:
    """Those of the one that came in are called with the one that is returned, and may be removed.
    The other way round, it has them when it is used alone again."""

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        called.append(("pre", optimizer))
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-2)

    def register(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            optimizer.register_step_pre_hook(clip),
            optimizer.register_step_post_hook(lambda o, *_: called.append(("post", o))),
            optimizer.register_state_dict_pre_hook(lambda o: called.append(("save", o))),
            optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "more": 7}),
            optimizer.register_load_state_dict_pre_hook(without_more),
            optimizer.register_load_state_dict_post_hook(lambda o: called.append(("loaded", o))),
        ]

    def without_more(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        assert saved.pop("more") == 7  # of a copy
        group = {**saved["param_groups"][0], "lr": 0.25}
        return {**saved, "param_groups": [group]}

    called: list[tuple[str, Any]] = []
    plain, model = build(make), build(make)
    reference, inner = SGD(plain.parameters(), lr=1e-1), SGD(model.parameters(), lr=1e-1)
    register(reference)
    handles = register(inner) if registered_on == "ahead" else []
    model, optimizer = tight(model, inner)
    handles = handles or register(inner if registered_on == "inner" else optimizer)
    for m, o in ((plain, reference), (model, optimizer)):
        called.clear()
        steps(m, o, count=2)
        saved = o.state_dict()
        o.load_state_dict(saved)
        assert saved["more"] == 7
        assert o.param_groups[0]["lr"] == 0.25
        assert [kind for kind, _ in called] == ["pre", "post", "pre", "post", "save", "loaded"]
        assert all(which is o for _, which in called)
    assert_same(model, plain, 1e-6)
    # The returned one steps, the other is refused; alone again it may, with all of the hooks.
    with pytest.raises(RuntimeError, match="returned"):
        inner.step()
    called.clear()
    strata.unwrap(model)
    steps(model, inner, count=1)
    assert called == [("pre", inner), ("post", inner)]
    for handle in handles:
        handle.remove()
    steps(model, inner, count=1)
    assert len(called) == 2


@pytest.mark.parametrize("rule", ["adamw", "sgd with momentum", "sgd"])
def test_state_dict_resumes(core: ModuleType, rule: str) -> None:
    first = build(make)
    first, optimizer = tight(first, RULES[rule](first.parameters()))
    steps(first, optimizer, count=4)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = build(make, seed=5)
    second, resumed = tight(second, RULES[rule](second.parameters()))
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(second, resumed, count=4)
    plain = build(make)
    reference = RULES[rule](plain.parameters())
    steps(plain, reference, count=4)
    steps(plain, reference, count=4)
    assert_same(second, plain, 1e-5)


def test_state_dict_is_the_one_of_torch(core: ModuleType) -> None:
    plain = build(make)
    inner = adamw(plain)
    steps(plain, inner)
    model, optimizer = tight(build(make))
    assert optimizer.state_dict()["state"] == {}
    steps(model, optimizer)
    expected, found = inner.state_dict(), optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        assert found["state"][key].keys() == entry.keys()
        for name, value in entry.items():
            torch.testing.assert_close(found["state"][key][name], value, rtol=1e-4, atol=1e-6)
    # And the way back: a plain checkpoint goes into a wrapped optimizer, and out again.
    _, resumed = tight(build(make))
    resumed.load_state_dict(expected)
    for key, entry in expected["state"].items():
        for name, value in entry.items():
            assert torch.equal(resumed.state_dict()["state"][key][name], value)


def test_bad_state_dicts_are_refused(core: ModuleType) -> None:
    _, optimizer = tight(build(make))
    state = adamw(build(make)).state_dict()
    wide = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    other = adamw(wide)
    steps_of = wide(torch.ones(1, 8)).sum()
    steps_of.backward()
    other.step()
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(other.state_dict())
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict(state)


def test_groups_cannot_be_added(core: ModuleType) -> None:
    _, optimizer = tight(build(make))
    with pytest.raises(RuntimeError, match=r"an optimizer of its own, or call strata\.unwrap"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_parameters_in_no_group_stay(core: ModuleType) -> None:
    model = build(make)
    inner = AdamW(model[0].parameters(), lr=1e-2)  # type: ignore[index]
    before = model[2][0].weight.detach().clone()  # type: ignore[index]
    model, optimizer = tight(model, inner)
    steps(model, optimizer)
    assert torch.equal(model[2][0].weight, before)


def test_the_inner_optimizer_cannot_step(core: ModuleType) -> None:
    model = build(make)
    inner = adamw(model)
    model, _ = tight(model, inner)
    model(torch.ones(1, 48)).sum().backward()
    with pytest.raises(RuntimeError, match="returned"):
        inner.step()


class PassingOn(torch.optim.Optimizer):
    """As Accelerator.prepare() makes of an optimizer: groups are those of the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state


def test_an_optimizer_around_another_is_refused_and_left_alone(core: ModuleType) -> None:
    model = build(make)
    inner = adamw(model)
    with pytest.raises(TypeError, match="PassingOn passes everything on to an optimizer inside"):
        strata.wrap(model, PassingOn(inner))
    assert [len(group["params"]) for group in inner.param_groups] == [6]


def test_unsupported_optimizers_are_refused(core: ModuleType) -> None:
    model = build(make)
    with pytest.raises(TypeError, match="LBFGS"):
        strata.wrap(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="amsgrad"):
        strata.wrap(model, AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match="other parameters"):
        strata.wrap(model, AdamW(build(make).parameters()))
    used = adamw(model)
    model(torch.ones(1, 48)).sum().backward()
    used.step()
    with pytest.raises(ValueError, match="load_state_dict"):
        strata.wrap(model, used)
    with pytest.raises(TypeError, match="optimizer"):
        strata.wrap(model, model.parameters())  # type: ignore[arg-type]
