"""Which optimizers and options of parameter groups strata can follow, and how the core names them.

foreign = check_optimizer(optimizer, model)  # ahead of wrap()
check_options("AdamW", group)                # the user may change them at any time
spec = group_spec(optimizer, 0, group, foreign)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .foreign import NATIVE, Foreign, make_foreign

if TYPE_CHECKING:
    from .._core import GroupSpec, Kind

# They change the arithmetic in ways that the kernels do not know.
UNSUPPORTED = ("amsgrad", "differentiable")
# Ways to compute the same.
HARMLESS = {"foreach", "fused", "capturable"}
FOLLOWED = {
    *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize", "momentum"),
    *("dampening", "nesterov", "lr_decay", "initial_accumulator_value"),
}

MOMENT_NAMES: dict[str, list[tuple[Kind, str]]] = {
    "adamw": [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")],
    "adam": [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")],
    "sgd": [("moment1", "momentum_buffer")],
    "lion": [("moment1", "exp_avg")],
    "adagrad": [("moment1", "sum")],
}

COUNTED = ("adamw", "adam", "adagrad")  # their classes keep the number of a step


def _number(number: int, option: str, value: Any) -> float:
    """The value of an option of group `number`. Raises ValueError, naming both, for no number."""
    where = f"parameter group {number} has {option}"
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # of None, lists and tensors of several
        pass
    except OverflowError as error:  # of whole numbers; hundreds of digits would be shown
        raise ValueError(f"{where} larger than any float") from error
    raise ValueError(f"{where}={value!r}, which is not a number")


def _pair(number: int, option: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(
            f"parameter group {number} has {option}={value!r}, which must be two numbers"
        )
    return _number(number, option, value[0]), _number(number, option, value[1])


def _needed(number: int, option: str, group: dict[str, Any]) -> float:
    """Of an option that every class has."""
    if option not in group:
        raise ValueError(f"parameter group {number} has no {option!r}")
    return _number(number, option, group[option])


def _check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where a class that has a kernel has an option, in use, that it lacks."""
    known = FOLLOWED | HARMLESS | set(UNSUPPORTED)
    for option, value in optimizer.defaults.items():
        if option not in known and value:
            _refuse(type(optimizer).__name__, option, value)


def check_options(name: str, group: dict[str, Any]) -> None:
    """Raises ValueError where a group of this class has an option in use that is not supported."""
    for option in UNSUPPORTED:
        if group.get(option):
            _refuse(name, option, group[option])


def _refuse(name: str, option: str, value: Any) -> None:
    raise ValueError(
        f"{name}({option}={value}) is not supported: build the optimizer without {option}"
    )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Foreign | None:
    """Raises where strata cannot stand for this optimizer on this model.

    Returns what runs its class; None where there are kernels for it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim optimizer, not {type(optimizer).__name__}")
    if isinstance(getattr(type(optimizer), "param_groups", None), property):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} passes everything on to an optimizer inside: give that one to strata.wrap(), "
            f"and what wrap() returns to what made the {name} (Accelerator.prepare(), for example)"
        )
    # Adagrad has a state before its first step.
    if any(entry.get("step", 1) > 0 for entry in optimizer.state.values()):
        raise ValueError(
            "the optimizer already has state from earlier steps: wrap a fresh one, then call "
            "load_state_dict(old.state_dict()) on the optimizer that strata.wrap() returns"
        )
    own = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        check_options(type(optimizer).__name__, group)
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"the optimizer was built from other parameters: number {i} of group {g}, of "
                    f"shape {tuple(parameter.shape)}, is not in the model"
                )
    foreign = make_foreign(optimizer)
    if foreign is None:
        _check_class(optimizer)
    return foreign


def group_spec(
    optimizer: torch.optim.Optimizer,
    number: int,
    group: dict[str, Any],
    foreign: Foreign | None = None,
) -> GroupSpec:
    """The hyperparameters of group `number`, now, as the core takes them. Raises ValueError, with
    group and option, for what is no number."""
    lr = _needed(number, "lr", group)
    if foreign is not None:
        # The core needs to know only how much is kept: the class takes its options from `foreign`.
        return {
            "rule": "foreign", "lr": lr, "beta1": 0.0, "beta2": 0.0, "eps": 0.0,
            "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0,
            "initial_accumulator": 0.0, "nesterov": False, "maximize": False,
            "options": foreign.remember(group), "moments": len(foreign.kept(group).moments),
        }  # fmt: skip
    rule = NATIVE[type(optimizer)]
    if rule in ("adam", "adamw"):  # AdamW is Adam with this option, which may be changed
        rule = "adamw" if group.get("decoupled_weight_decay", rule == "adamw") else "adam"

    def option(name: str, options: dict[str, Any] = group) -> float:
        return _number(number, name, options.get(name, 0.0))  # 0: the class has none

    beta1, beta2 = _pair(number, "betas", group.get("betas", (0.0, 0.0)))
    return {
        "rule": rule,  # type: ignore[typeddict-item]
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": option("eps"),
        "weight_decay": _needed(number, "weight_decay", group),
        "momentum": option("momentum"),
        "dampening": option("dampening"),
        "lr_decay": option("lr_decay"),
        # Adagrad's sums begin with what it was built with, whatever its groups say.
        "initial_accumulator": option("initial_accumulator_value", optimizer.defaults),
        "nesterov": bool(group.get("nesterov", False)),
        "maximize": bool(group.get("maximize", False)),
    }


def moments_of(spec: GroupSpec) -> list[tuple[Kind, str]]:
    """The moments that the rule of a group keeps: as the core names them, and as torch does."""
    if spec["rule"] == "foreign":
        moments: list[Kind] = ["moment1", "moment2"]
        return [(kind, kind) for kind in moments[: spec["moments"]]]
    return MOMENT_NAMES[spec["rule"]] if spec["rule"] != "sgd" or spec["momentum"] else []
