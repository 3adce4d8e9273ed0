"""What optimizer.load_state_dict() is given, looked at before any of it is taken over.

    groups = saved_groups(state_dict, optimizer.param_groups)
    entries = saved_entries(state_dict, groups)          # by the number of a parameter
    check_entry("0.weight", entry, shape, moments=["exp_avg"], needed=["exp_avg"], counted=True)

All of them raise ValueError, with the parameter's name and what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from .._torch_compat import FakeTensor

# The core adds one to it in 64 bits, and the rules raise numbers to its power as float64, which
# knows all whole numbers up to here.
STEP_MAX = 1 << 53


def saved_groups(state_dict: Any, own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups of a state dict, as many and as large as one's own."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"the state of an optimizer is a dictionary, not {_kind(state_dict)}")
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise ValueError(f"loaded state dict has no {key!r}: it is no optimizer's state_dict()")
    groups = state_dict["param_groups"]
    if not isinstance(groups, list | tuple):
        raise ValueError(f"'param_groups' of the loaded state dict is {_kind(groups)}, not a list")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise ValueError(f"parameter group {number} of the loaded state dict has no 'params'")
        if not all(isinstance(param, int) for param in group["params"]):
            raise ValueError(
                f"'params' of parameter group {number} of the loaded state dict are not numbers"
            )
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own]:
        raise ValueError("loaded state dict has other parameter groups than the optimizer")
    return list(groups)


def saved_entries(
    state_dict: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> Mapping[Any, Any]:
    """The states of parameters. What belongs to none of them would be lost without a word."""
    entries = state_dict["state"]
    if not isinstance(entries, Mapping):
        raise ValueError(f"'state' of the loaded state dict is {_kind(entries)}, not a dictionary")
    unknown = entries.keys() - {number for group in groups for number in group["params"]}
    if unknown:
        keys = sorted(map(repr, unknown))
        raise ValueError(f"loaded state dict has a state of {keys[0]}, which is no parameter of it")
    return entries


def check_entry(
    name: str,
    entry: Any,
    shape: torch.Size,
    *,
    moments: Iterable[str],
    needed: Collection[str],
    counted: bool,
    scalars: Iterable[str] = (),
) -> None:
    """Looks at the state of one parameter.

    moments: those there is room for. needed: those that a parameter has once it was updated.
    counted: whether the class counts its steps, or keeps moments alone. scalars: its other numbers.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"the state of {name!r} is {_kind(entry)}, not a dictionary")
    present = [moment for moment in moments if entry.get(moment) is not None]
    for moment in present:
        _check_moment(name, moment, entry[moment], shape)
    steps = whole_step(name, entry["step"]) if "step" in entry else 0
    missing = [moment for moment in needed if moment not in present]
    if missing and (present or steps):
        begun = f"has {present[0]!r}" if present else f"says step {steps}"
        raise ValueError(f"the state of {name!r} {begun}, and has no {missing[0]!r}")
    if counted and present and "step" not in entry:
        raise ValueError(f"the state of {name!r} has {present[0]!r}, and has no 'step'")
    for scalar in scalars:
        if not _is_number(entry.get(scalar)):
            raise ValueError(
                f"{scalar!r} in the state of {name!r} is {_kind(entry[scalar])}, not a number"
            )


def whole_step(name: str, value: Any) -> int:
    """How many steps the state of a parameter says that it has made."""
    if not _is_number(value) or value is None:
        raise ValueError(f"the state of {name!r} has a step that is {_kind(value)}, not a number")
    step = value.item() if torch.is_tensor(value) else value
    if not 0 <= step <= STEP_MAX or math.floor(step) != step:
        raise ValueError(
            f"the state of {name!r} says step {step}, which must be a whole number from 0 to "
            f"{STEP_MAX}"
        )
    return int(step)


def _check_moment(name: str, moment: str, value: Any, shape: torch.Size) -> None:
    what = f"{moment!r} in the state of {name!r}"
    if not torch.is_tensor(value):
        raise ValueError(f"{what} is {_kind(value)}, not a tensor")
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else value.layout
        raise ValueError(f"{what} has the layout {layout}: make it dense first")
    if value.is_meta or isinstance(value, FakeTensor):
        where = "on the meta device" if value.is_meta else "fake"
        raise ValueError(f"{what} is {where} and has no values")
    if not value.is_floating_point():
        raise ValueError(f"{what} is {value.dtype}, and moments are real floating-point numbers")
    if value.shape != shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, and the parameter has {tuple(shape)}"
        )


def _is_number(value: Any) -> bool:
    """Also None, which some classes keep where there is nothing to count yet."""
    if torch.is_tensor(value):
        dense = not value.is_nested and value.layout == torch.strided
        known = not value.is_meta and not isinstance(value, FakeTensor)
        return dense and known and value.numel() == 1 and not value.is_complex()
    return value is None or isinstance(value, Real)


def _kind(value: Any) -> str:
    """For people: what a value is."""
    if not torch.is_tensor(value):
        return f"a {type(value).__name__}"
    where = "meta" if value.is_meta else str(value.dtype)
    return f"a {where} tensor" if value.is_nested else f"a {where} tensor of {tuple(value.shape)}"
