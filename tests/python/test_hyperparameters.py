"""Options of parameter groups that change after wrap(): followed, or refused by name."""

import copy
import io
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build, tight
from strata import LockFree
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.optim import SGD, Adam, AdamW


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3)])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    torch.manual_seed(2)
    for _ in range(count):
        (model(torch.randn(4, 48)) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


NAN = float("nan")
MISSING = object()  # the option is deleted
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SGD, {"momentum": 0.9}, r"group 0 has momentum=0\.9 now .* before strata.wrap"),
    (SGD, {"momentum": NAN}, "group 0 has momentum=nan"),
    (SGD, {"lr": NAN}, "group 0 has lr=nan"),
    (AdamW, {"lr": -1.0}, "group 0 has lr=-1"),
    (AdamW, {"betas": (0.9, 1.0)}, r"group 0 has betas\[1\]=1"),
    (AdamW, {"betas": (-0.1, 0.9)}, r"group 0 has betas\[0\]=-0.1"),
    (AdamW, {"eps": -1.0}, "group 0 has eps=-1"),
    (Adam, {"weight_decay": NAN}, "group 0 has weight_decay=nan"),
    (Adam, {"amsgrad": True}, r"Adam\(amsgrad=True\) is not supported"),
    (AdamW, {"amsgrad": True}, r"AdamW\(amsgrad=True\) is not supported"),
    (SGD, {"differentiable": True}, r"SGD\(differentiable=True\) is not supported"),
    (AdamW, {"lr": "a"}, "group 0 has lr='a', which is not a number"),
    (AdamW, {"lr": 10**400}, "group 0 has lr larger than any float"),
    (AdamW, {"betas": (0.9, 10**400)}, "group 0 has betas larger than any float"),
    (SGD, {"lr": MISSING}, "group 0 has no 'lr'"),
    (Adam, {"weight_decay": MISSING}, "group 0 has no 'weight_decay'"),
    (SGD, {"momentum": None}, "group 0 has momentum=None, which is not a number"),
    (AdamW, {"betas": 0.9}, r"group 0 has betas=0\.9, which must be two numbers"),
    (AdamW, {"betas": (0.9, "b")}, "group 0 has betas='b', which is not a number"),
    (torch.optim.RMSprop, {"lr": MISSING}, "group 0 has no 'lr'"),
    (torch.optim.RMSprop, {"momentum": 0.9}, "RMSprop keeps 'square_avg', 'momentum_buffer'"),
]


@pytest.mark.parametrize("update", ["on_step", "in_backward"])
@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    kind: Any, options: dict[str, Any], message: str, update: str
) -> None:
    inner = build(make)
    model, optimizer = tight(inner, kind(inner.parameters(), lr=1e-3), update=update)
    group = optimizer.param_groups[0]
    before = {name: group[name] for name in options}
    # 1. In a state dict: nothing of it is taken over.
    changed = {name: value for name, value in options.items() if value is not MISSING}
    if changed:
        saved = optimizer.state_dict()
        saved["param_groups"][0].update(changed)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert {name: group[name] for name in options} == before
    # 2. In the group: the step is refused, and made when the option is what it was.
    group.update(changed)
    for name in options.keys() - changed.keys():
        del group[name]
    with pytest.raises(ValueError, match=message):
        steps(model, optimizer, 1)
    group.update(before)
    optimizer.zero_grad()
    steps(model, optimizer, 1)


@pytest.mark.parametrize("update", ["on_step", "in_backward"])
def test_momentum_may_go_and_come_back(core: ModuleType, update: str) -> None:
    plain, inner = build(make), build(make)
    reference = SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = tight(inner, SGD(inner.parameters(), lr=1e-3, momentum=0.9), update=update)
    for m, o in ((plain, reference), (model, optimizer)):
        for momentum in (0.0, 0.9, 0.0, 0.5):
            o.param_groups[0]["momentum"] = momentum
            steps(m, o)
    assert_same(model, plain, 1e-5)


def moved(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(0))


def removed(groups: list[dict[str, Any]]) -> None:
    del groups[0]["params"][0]


def exchanged(groups: list[dict[str, Any]]) -> None:
    for group, other in zip(groups, (groups[1]["params"], groups[0]["params"]), strict=True):
        group["params"] = other


def foreign(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("update", ["on_step", "in_backward", LockFree(0)], ids=str)
@pytest.mark.parametrize("edit", [moved, removed, exchanged, foreign])
def test_parameters_stay_in_their_groups(core: ModuleType, edit: Any, update: Any) -> None:
    inner = build(make)
    groups = [{"params": list(inner[0].parameters())}, {"params": list(inner[1:].parameters())}]  # type: ignore[index]
    model, optimizer = tight(inner, SGD(groups, lr=1e-3), update=update)
    steps(model, optimizer)
    before = [list(group["params"]) for group in optimizer.param_groups]
    edit(optimizer.param_groups)
    name = "another tensor" if edit is foreign else "'0.0.weight'"
    with pytest.raises(RuntimeError, match=f"{name} was put .*strata.unwrap.*requires_grad_"):
        steps(model, optimizer)
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = params  # another list with the same in it
    optimizer.zero_grad()
    steps(model, optimizer)


class Integers(nn.Module):
    """Its gradients are small whole numbers, so updates by powers of two do not round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(-4, 5, parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).sum() for layer in self.layers)  # type: ignore[return-value]


def dampened(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.5, momentum=0.5, dampening=0.25)


def whole_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, momenta: tuple[float, ...]
) -> None:
    torch.manual_seed(3)
    for momentum in momenta:
        optimizer.param_groups[0]["momentum"] = momentum
        model(torch.randint(-2, 3, (2, 8)).float()).backward()
        optimizer.step()
        optimizer.zero_grad()


MOMENTA = [(0.5, 0.5, 0.5), (0.0, 0.5, 0.5), (0.0, 0.0, 0.5, 0.0, 0.5), (0.5, 0.0, 0.5)]


@pytest.mark.parametrize("update", ["on_step", "in_backward", LockFree(0)], ids=str)
@pytest.mark.parametrize("momenta", MOMENTA, ids=str)
def test_the_first_momentum_is_not_dampened(
    core: ModuleType, momenta: tuple[float, ...], update: Any
) -> None:
    """As in torch, the first one that there is: of the first step that has momentum."""
    plain, inner = build(Integers), build(Integers)
    model, optimizer = tight(inner, dampened(inner), update=update)
    whole_steps(plain, dampened(plain), momenta)
    whole_steps(model, optimizer, momenta)
    assert_same(model, plain)


@pytest.mark.parametrize("when", ["built", "wrapped"])
def test_sums_of_adagrad_begin_as_it_was_built(core: ModuleType, when: str) -> None:
    """torch fills them when it is built, and looks at the groups' own values never."""

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        other = {"params": parameters[2:], "initial_accumulator_value": 3.0}
        groups = [
            {"params": parameters[:2]},
            other if when == "built" else {"params": parameters[2:]},
        ]
        return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5)

    plain, inner = build(make), build(make)
    reference = adagrad(plain)
    model, optimizer = tight(inner, adagrad(inner))
    for m, o in ((plain, reference), (model, optimizer)):
        if when == "wrapped":
            o.param_groups[1]["initial_accumulator_value"] = 3.0
        o.param_groups[0]["lr_decay"] = 0.25  # counted from the first step on
        steps(m, o)
        o.param_groups[1]["lr_decay"] = 0.25
        o.param_groups[0]["weight_decay"] = 0.1
        steps(m, o)
    assert_same(model, plain, 1e-5)


def test_sums_from_before_the_first_step_are_those_of_this_adagrad(core: ModuleType) -> None:
    inner = build(make)
    _model, optimizer = tight(inner, torch.optim.Adagrad(inner.parameters()))
    plain = build(make)
    optimizer.load_state_dict(torch.optim.Adagrad(plain.parameters()).state_dict())
    other = torch.optim.Adagrad(plain.parameters(), initial_accumulator_value=0.5)
    with pytest.raises(ValueError, match=r"'0.0.weight' is from before its first step"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("way", ["checkpoint", "state_dict", "from torch", "to torch"])
@pytest.mark.parametrize("before", [(0.0, 0.0), (0.0, 0.5)], ids=str)
def test_what_is_saved_knows_whether_there_was_momentum(
    way: str, before: tuple[float, ...], tmp_path: Path
) -> None:
    def wrapped_one() -> Any:
        inner = build(Integers)
        return tight(inner, dampened(inner))

    plain = build(Integers)
    reference = dampened(plain)
    first: Any = (plain, reference) if way == "from torch" else wrapped_one()
    whole_steps(*first, before)
    second: Any = (build(Integers),) if way == "to torch" else wrapped_one()
    if way == "to torch":
        second = (second[0], dampened(second[0]))
    if way == "checkpoint":
        strata.save(first[0], tmp_path / "checkpoint")
        strata.load(second[0], tmp_path / "checkpoint")
    else:
        second[0].load_state_dict({k: v.clone() for k, v in first[0].state_dict().items()})
        second[1].load_state_dict(first[1].state_dict())
    if way != "from torch":
        whole_steps(plain, reference, before)
    whole_steps(*second, (0.5, 0.5))
    whole_steps(plain, reference, (0.5, 0.5))
    assert_same(second[0], plain)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_weight_decay_may_be_coupled_and_decoupled(core: ModuleType, kind: Any) -> None:
    plain, inner = build(make), build(make)
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.3}
    reference = kind(plain.parameters(), **options)
    model, optimizer = tight(inner, kind(inner.parameters(), **options))
    for m, o in ((plain, reference), (model, optimizer)):
        for decoupled in (True, False):
            o.param_groups[0]["decoupled_weight_decay"] = decoupled
            steps(m, o)
    assert_same(model, plain, 1e-5)


def test_a_state_dict_that_does_not_fit_changes_nothing(core: ModuleType) -> None:
    inner = build(make)
    model, optimizer = tight(inner, AdamW(inner.parameters(), lr=1e-3))
    steps(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["state"][0]["exp_avg"].fill_(7.0)
    bad["state"][5]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(bad)
    bad = copy.deepcopy(before)
    bad["state"][0]["exp_avg"].fill_(7.0)
    bad["state"][5]["step"] = torch.tensor(-3.0)
    with pytest.raises(ValueError, match=r"says step -3.0"):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert all(
        torch.equal(after["state"][i][name], value)
        for i, entry in before["state"].items()
        for name, value in entry.items()
    )


def test_the_optimizer_cannot_be_copied_and_its_state_can(core: ModuleType) -> None:
    inner = build(make)
    model, optimizer = tight(inner, AdamW(inner.parameters(), lr=1e-3))
    steps(model, optimizer)
    ways = (copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO()))
    for way in ways:
        with pytest.raises(TypeError, match=r"optimizer\.state_dict\(\)"):
            way(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert pickle.loads(pickle.dumps(saved)).keys() == saved.keys()
    copy.deepcopy(model)


@pytest.mark.parametrize("clip", ["max_grad_norm", "max_unit_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_is_clipped_as_torch_does(
    core: ModuleType, clip: str, value: float
) -> None:
    plain, inner = build(make), build(make)
    reference = SGD(plain.parameters(), lr=1.0)
    model, optimizer = tight(inner, SGD(inner.parameters(), lr=1.0), **{clip: 1.0})
    x = torch.ones(1, 48)
    for m in (plain, model):
        loss = m(x).sum() + m(x)[0, 0] * value
        loss.backward()
    groups = [list(plain.parameters())]
    if clip == "max_unit_norm":
        groups = [[groups[0][i] for i in u.params] for u in wrapped(model).units]
    for group in groups:
        nn.utils.clip_grad_norm_(group, 1.0)
    reference.step()
    optimizer.step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name].clone(), expected, equal_nan=True, rtol=1e-5, atol=1e-5
        )
