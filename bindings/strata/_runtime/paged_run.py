"""Runs an operation of torch on parameters outside their module, while their units are entered.

    result = run(torch.add, (paged, 1), {})

Note [Writes]. Which arguments an operation changes is known from its schema. A function of Python's
has none: there version counters before and after tell. The core then takes the value on the device
for the parameter's value in all tiers. A `copy_` into a contiguous range goes to the
master copy instead, so that a float32 source is kept exactly.

Note [More than fits]. Where the units do not fit on the device together, an operation on lists is
done for one item after the other. Of any other one, what it only reads is copied out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._config.sharding import shard_of
from .._errors import StrataError
from .._torch_compat import DisableTorchFunction, graph_task, is_dtensor
from .tensor_functions import Function, list_length, name_of, one_by_one, written
from .visits import Visit
from .wrapped import Slot, Wrapped


def is_paged(value: Any) -> bool:
    """Whether it is a parameter outside its module, or a view of one."""
    return getattr(type(value), "_strata_is_paged", False) is True


def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation while the units of all its paged arguments are entered."""
    paged = list(paged_in((args, kwargs)))
    units = {_unit_of(t): t._strata for t in paged}
    changing = list(paged_in(written(func, args, kwargs)))
    changing_units = {_unit_of(t) for t in changing}
    entered: list[Slot] = []
    visits: list[tuple[Slot, Visit, int]] = []  # and the saved-tensor hooks before it
    try:
        # 1. Bring the units in. What autograd saves of them is found again by its address.
        backward = graph_task() != -1  # a user's checkpoint reads it there
        recorded = {id(t._strata.state): in_step(t._strata.state, func) for t in paged}
        for key, slot in units.items():
            visit = slot.state.visits.add(Visit())
            visits.append((slot, visit, slot.state.hooks.saved.pushed()))
            if key in changing_units:
                slot.state.session.expect_write(slot.index)
            slot.state.hooks.saved.hold_outside(slot.unit)
            computes = recorded[id(slot.state)]
            slot.state.enter(slot.unit, visit, backward, recorded=computes)
            entered.append(slot)
            slot.state.hooks.saved.push_outside()
        for tensor in paged if backward else ():
            tensor._strata.state.check_old(tensor._strata.index)
        # 2. Run.
        with DisableTorchFunction():
            versions = [t._version for t in paged]
            spreads = any(slot.state.shards is not None for slot in units.values())
            if spreads and not changing:
                args, kwargs = _spread(args), _spread(kwargs)
            result = func(*args, **kwargs)
            # 3. Tell the core what was changed, and mark what may outlive the visit.
            changed = [t for t, v in zip(paged, versions, strict=True) if t._version != v]
            for state, index in {(t._strata.state, t._strata.index) for t in changed + changing}:
                state.note_write(index)
            return _guard(result, units)
    except StrataError as error:
        if len(entered) == len(units) or not entered:
            raise
        refused = error
    finally:
        for slot, visit, pushed in reversed(visits):
            slot.state.hooks.saved.pop_to(pushed)
            slot.state.leave(slot.unit, visit)
            slot.state.visits.end(visit)
    return _in_parts(func, args, kwargs, refused)


def _unit_of(tensor: Any) -> tuple[int, int]:
    """What tells units apart, of all models."""
    return id(tensor._strata.state), tensor._strata.unit.index


def _in_parts(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], refused: StrataError
) -> Any:
    """See Note [More than fits]. Raises `refused` where nothing is left to be copied out."""
    if list_length(func, args, kwargs) > 1:
        return one_by_one(func, args, kwargs)
    stay = {id(tensor) for tensor in paged_in(written(func, args, kwargs))}
    copies: list[tuple[torch.Tensor, int]] = []

    def copied_out(tensor: Any) -> Any:
        if id(tensor) in stay:
            return tensor
        copy = tensor.clone()  # autograd follows
        copies.append((copy, copy._version))
        return copy

    args, kwargs = mapped(copied_out, args), mapped(copied_out, kwargs)
    if not copies:
        raise refused
    result = func(*args, **kwargs)
    if any(copy._version != version for copy, version in copies):
        raise StrataError(
            f"{name_of(func)} changes parameters that do not fit on the device together, and does "
            "not say which: change one after the other"
        ) from refused
    return result


def in_step(state: Wrapped, func: Function) -> bool:
    """Whether the model computes now; where it does not, all updates are seen to first."""
    computes = state.hooks.frames.in_step()
    if not computes:
        state.hooks.reset()
        state.refuse_half_step(f"{name_of(func)} of a parameter")
        state.catch_up()
    return computes


def _spread(value: Any) -> Any:
    """Arguments with every parameter that is a shard replaced by its DTensor, where a forward or a
    backward uses it, as modules find it. REQUIRES: the units are entered."""

    def whole(tensor: Any) -> Any:
        state, index = tensor._strata.state, tensor._strata.index
        if state.shards is None or not isinstance(tensor, nn.Parameter):
            return tensor
        return state.shards.whole(index, tensor) if state.hooks.frames.in_forward() else tensor

    return mapped(whole, value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments with every paged tensor replaced by what `change` makes of it."""
    if is_paged(value):
        return change(value)
    if type(value) is tuple or type(value) is list:
        return type(value)(mapped(change, item) for item in value)
    if type(value) is dict:
        return {key: mapped(change, item) for key, item in value.items()}
    return value


def paged_in(value: Any) -> Iterator[Any]:
    """The paged tensors among arguments, nested ones too."""
    if is_paged(value):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from paged_in(item)


def _guard(result: Any, units: dict[tuple[int, int], Slot]) -> Any:
    """Makes paged tensors of those results that are views of a parameter, and copies of those that
    are DTensors. See Note [Aliases] of paged.py."""
    if type(result) is torch.Tensor:
        for other in units.values():
            state = other.state
            if (index := state.under(result)) >= 0:
                state.views.mark(result, index)
    elif isinstance(result, tuple | list):
        items = [_guard(item, units) for item in result]
        if any(a is not b for a, b in zip(items, result, strict=True)):
            return type(result)(items)
    elif isinstance(result, torch.Tensor) and is_dtensor(result):
        shard = shard_of(result).data_ptr()
        return result.clone() if any(of.state.find(shard) >= 0 for of in units.values()) else result
    return result
