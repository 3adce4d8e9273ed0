"""Runs an operation of torch on parameters outside their module, while their units are entered.

    result = run(torch.add, (paged, 1), {})

Note [Writes]. An in-place operation raises the version counter of the tensor it changes; comparing
the counters before and after finds every one of them. The core then takes the value on the device
for the parameter's value in all tiers. A `copy_` into a contiguous range goes to the master copy
instead, so that a float32 source is kept exactly.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._config.sharding import shard_of
from .._errors import StrataError, with_more
from .._torch_compat import DisableTorchFunction, graph_task, is_dtensor
from .tensor_functions import Function, may_write, name_of, optimizer_advice
from .visits import Visit
from .wrapped import Slot, Wrapped


def is_paged(value: Any) -> bool:
    """Whether it is a parameter outside its module, or a view of one."""
    return getattr(type(value), "_strata_is_paged", False) is True


def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation while the units of all its paged arguments are entered."""
    paged = list(paged_in((args, kwargs)))
    units = {(id(t._strata.state), t._strata.unit.index): t._strata for t in paged}
    entered: list[Slot] = []
    visits: list[tuple[Slot, Visit, int]] = []  # and the saved-tensor hooks before it
    try:
        # 1. Bring the units in. What autograd saves of them is found again by its address.
        backward = graph_task() != -1  # a user's checkpoint reads it there
        recorded = {id(t._strata.state): in_step(t._strata.state, func) for t in paged}
        for slot in units.values():
            visit = slot.state.visits.add(Visit())
            visits.append((slot, visit, slot.state.hooks.saved.pushed()))
            if may_write(func, kwargs):
                slot.state.session.expect_write(slot.index)
            slot.state.hooks.saved.hold_outside(slot.unit)
            computes = recorded[id(slot.state)]
            slot.state.enter(slot.unit, visit, backward, recorded=computes, exact=not computes)
            entered.append(slot)
            slot.state.hooks.saved.push_outside()
        for tensor in paged if backward else ():
            tensor._strata.state.check_old(tensor._strata.index)
        # 2. Run.
        with DisableTorchFunction():
            versions = [t._version for t in paged]
            spreads = any(slot.state.shards is not None for slot in units.values())
            if spreads and not may_write(func, kwargs):
                args, kwargs = _spread(args), _spread(kwargs)
            result = func(*args, **kwargs)
            # 3. Tell the core what was changed, and mark what may outlive the visit.
            for tensor, version in zip(paged, versions, strict=True):
                if tensor._version != version:
                    tensor._strata.state.note_write(tensor._strata.index)
            return _guard(result, units)
    except StrataError as error:
        if advice := optimizer_advice(func):
            raise with_more(error, f"; {advice}") from error
        if len(entered) == len(units) or not entered or may_write(func, kwargs):
            raise
    finally:
        for slot, visit, pushed in reversed(visits):
            slot.state.hooks.saved.pop_to(pushed)
            slot.state.leave(slot.unit, visit)
            slot.state.visits.end(visit)
    # They do not fit on the device together: copy them out one by one. Autograd follows.
    return func(*_copied_out(args), **_copied_out(kwargs))


def in_step(state: Wrapped, func: Function) -> bool:
    """Whether the model computes now; where it does not, all updates are seen to first."""
    computes = state.hooks.frames.in_step()
    if not computes:
        state.hooks.reset()
        state.refuse_half_step(f"{name_of(func)} of a parameter")
        state.catch_up()
    return computes


def _copied_out(value: Any) -> Any:
    """Arguments with every paged tensor replaced by a copy in ordinary memory."""
    return mapped(lambda tensor: tensor.clone(), value)


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
            index = state.find(result.data_ptr()) if result.layout is torch.strided else -1
            if index >= 0:
                state.views.mark(result, index)
    elif isinstance(result, tuple | list):
        items = [_guard(item, units) for item in result]
        if any(a is not b for a, b in zip(items, result, strict=True)):
            return type(result)(items)
    elif isinstance(result, torch.Tensor) and is_dtensor(result):
        shard = shard_of(result).data_ptr()
        return result.clone() if any(of.state.find(shard) >= 0 for of in units.values()) else result
    return result
