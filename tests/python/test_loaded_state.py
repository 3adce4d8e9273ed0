"""optimizer.load_state_dict(): what is no state of this optimizer is refused; nothing changes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import build, tight
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

State = dict[str, Any]
Change = Callable[[State], object]


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3)])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(4, 48)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(kind: Any = AdamW, **options: Any) -> Any:
    inner = build(make)
    model, optimizer = tight(inner, kind(inner.parameters(), lr=1e-3, **options))
    steps(model, optimizer)
    return optimizer


def refused(optimizer: Any, bad: Any, message: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number, entry in before["state"].items():
        assert after["state"][number].keys() == entry.keys()
        for name, value in entry.items():
            assert torch.equal(
                torch.as_tensor(after["state"][number][name]), torch.as_tensor(value)
            )


def as_fake(value: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(value)


def put(name: str, value: Any) -> Change:
    """Sets an entry, or makes it what a function of torch does."""
    return lambda entry: entry.update({name: value(entry[name]) if callable(value) else value})


STEP = r"the state of '2\.0\.bias' says step "
MOMENT = r"'exp_avg' in the state of '2\.0\.bias' "
BAD: dict[str, tuple[Change, str]] = {
    "step too large": (put("step", 2**70), STEP + str(2**70) + ", which must be a whole number"),
    "step too large for float64": (put("step", torch.tensor(2.0**60)), STEP + r"1\.15\d*e\+18"),
    "step of a fraction": (put("step", 1.5), STEP + r"1\.5, which must be a whole number"),
    "step below 0": (put("step", torch.tensor(-3.0)), STEP + r"-3\.0"),
    "step NaN": (put("step", torch.tensor(float("nan"))), STEP + "nan"),
    "step infinite": (put("step", float("inf")), STEP + "inf"),
    "step in words": (put("step", "2"), r"'2\.0\.bias' has a step that is a str, not a number"),
    "step None": (put("step", None), "has a step that is a NoneType"),
    "step of several": (put("step", torch.ones(2)), r"is a torch\.float32 tensor of \(2,\)"),
    "step on meta": (put("step", torch.ones((), device="meta")), r"is a meta tensor of \(\)"),
    "step complex": (put("step", torch.tensor(1j)), "has a step that is a torch.complex64"),
    "no step": (lambda e: e.pop("step"), r"'2\.0\.bias' has 'exp_avg', and has no 'step'"),
    "sparse": (put("exp_avg", torch.Tensor.to_sparse), MOMENT + "has the layout torch.sparse_coo"),
    "nested": (
        put("exp_avg", lambda t: torch.nested.nested_tensor([t], layout=torch.jagged)),
        MOMENT + "has the layout nested",
    ),
    "meta": (put("exp_avg", lambda t: t.to("meta")), MOMENT + "is on the meta device"),
    "fake": (put("exp_avg", as_fake), MOMENT + "is fake and has no values"),
    "NumPy": (put("exp_avg", np.zeros(48)), MOMENT + "is a ndarray, not a tensor"),
    "complex": (put("exp_avg", torch.zeros(48) * 1j), MOMENT + "is torch.complex64, and moments"),
    "whole numbers": (put("exp_avg", torch.Tensor.long), MOMENT + "is torch.int64, and moments"),
    "shape": (put("exp_avg", torch.zeros(3)), MOMENT + r"has shape \(3,\), and the parameter"),
    "a moment missing": (lambda e: e.pop("exp_avg"), "has 'exp_avg_sq', and has no 'exp_avg'"),
    "a moment None": (put("exp_avg_sq", None), "has 'exp_avg', and has no 'exp_avg_sq'"),
    "no moment": (
        lambda e: [e.pop(name) for name in ("exp_avg", "exp_avg_sq")],
        r"'2\.0\.bias' says step 2, and has no 'exp_avg'",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_entry_is_refused_and_nothing_of_the_others_is_taken(what: str) -> None:
    optimizer = trained()
    change, message = BAD[what]
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 0.5
    bad["state"][0]["exp_avg"].fill_(7.0)
    bad["state"][0]["step"].fill_(9.0)
    change(bad["state"][5])
    refused(optimizer, bad, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("state"), "has no 'state'"),
        (lambda d: d.pop("param_groups"), "has no 'param_groups'"),
        (lambda d: d.update(state=[]), "'state' of the loaded state dict is a list"),
        (lambda d: d.update(param_groups={}), "'param_groups' .* is a dict, not a list"),
        (lambda d: d["param_groups"][0].pop("params"), "group 0 .* has no 'params'"),
        (lambda d: d["param_groups"][0].update(params=[[]] * 6), "group 0 .* are not numbers"),
        (lambda d: d["state"].update({1: None}), r"state of '0\.0\.bias' is a NoneType"),
        # As JSON keeps it: all moments would begin anew.
        (
            lambda d: d.update(state={str(key): entry for key, entry in d["state"].items()}),
            "a state of '0', which is no parameter of it",
        ),
    ],
)
def test_what_is_no_state_dict_is_refused(change: Change, message: str) -> None:
    optimizer = trained()
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 0.5
    change(bad)
    refused(optimizer, bad, message)


def test_what_is_no_dictionary_is_refused() -> None:
    refused(trained(), None, "is a dictionary, not a NoneType")


@pytest.mark.parametrize(
    ("kind", "options", "change", "message"),
    [
        (Adam, {}, put("exp_avg_sq", None), "has no 'exp_avg_sq'"),
        (Adagrad, {}, lambda e: e.pop("sum"), "says step 2, and has no 'sum'"),
        (SGD, {"momentum": 0.9}, lambda e: e.pop("momentum_buffer"), "has no 'momentum_buffer'"),
        (torch.optim.NAdam, {}, lambda e: e.pop("exp_avg"), "has no 'exp_avg'"),
        (torch.optim.NAdam, {}, lambda e: e.pop("step"), "has no 'step'"),
        (torch.optim.NAdam, {}, put("mu_product", "0.9"), "'mu_product' in .* is a str"),
        (torch.optim.NAdam, {}, put("mu_product", torch.ones(2)), r"'mu_product' .* of \(2,\)"),
    ],
)
def test_other_rules_say_what_is_missing_too(
    kind: Any, options: State, change: Change, message: str
) -> None:
    optimizer = trained(kind, **options)
    bad = copy.deepcopy(optimizer.state_dict())
    change(bad["state"][5])
    refused(optimizer, bad, message)


def test_what_torch_saves_of_parameters_that_made_no_step_is_taken() -> None:
    optimizer = trained(SGD, momentum=0.9)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    saved["state"][1] = {"momentum_buffer": None}
    saved["state"][2] = {"momentum_buffer": saved["state"][2]["momentum_buffer"].double()}
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"].keys() == {2, 3, 4, 5}
    optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = np.float32(2)
    saved["state"][1]["step"] = torch.tensor([2])
    saved["state"][2]["step"] = 2**53
    optimizer.load_state_dict(saved)
    made = [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
    assert made == [2, 2, 2**53, 2, 2, 2]


@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad])
def test_the_state_of_no_step_moves_nothing_when_it_is_loaded(kind: Any) -> None:
    """Accelerate loads what it has just read when it is given an optimizer."""
    inner = build(make)
    model, optimizer = tight(inner, kind(inner.parameters(), lr=1e-3))
    session = model.__dict__["_strata"].session
    before = {name: count for name, count in session.stats().items() if name.endswith("bytes")}
    optimizer.load_state_dict(optimizer.state_dict())
    after = session.stats()
    assert {name: after[name] for name in before} == before
    steps(model, optimizer)
    plain = build(make)
    again = kind(plain.parameters(), lr=1e-3)
    steps(plain, again)
    fresh = copy.deepcopy(optimizer.state_dict())
    fresh["state"] = {}
    optimizer.load_state_dict(fresh)
    assert optimizer.state_dict()["state"] == {}
