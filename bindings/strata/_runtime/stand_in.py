"""Tensors without memory, whose values are read when they are asked for.

    stand_in = make(StandIn, values)     # values: anything with what Values has
    stand_in.abs().max()                 # the values are read for this, and forgotten
    torch.save(stand_in, file)           # as a plain tensor; its values are in memory while they
                                         # are written, and of many tensors those of one at a time

Gradients (grad_tensor.py) and the state of optimizers (optimizer_state.py) are such. What is known
without the values is in the table `answered` of each class. Everything else comes to _run(), which
puts the values into the place of the stand-in, and tells their owner whether they were changed.

torch asks __torch_function__ ahead of autograd, so no graph keeps a tensor of these classes. What
C++ does by itself comes to __torch_dispatch__.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch

from .._torch_compat import DisableTorchFunction, compatible, make_wrapper, typed_storage
from . import own_mapping
from .paged_storage import UNREACHABLE, PagedStorage, saved_tensor
from .tensor_functions import (
    CONVERSIONS,
    METADATA,
    Function,
    changes_nothing,
    functions,
    list_length,
    name_of,
    one_by_one,
)

aten = torch.ops.aten
# What would give memory away, or take another's.
RAW = functions("__dlpack__ share_memory_ resize_ resize_as_ set_", "__cuda_array_interface__")


class Values(Protocol):
    """Whose values they are."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def open(self) -> torch.Tensor:
        """The values. close() comes next."""

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """Something was done with what open() returned."""


def _call(
    cls: type[StandIn], func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Called by torch instead of any operation that has a stand-in among its arguments."""
    kwargs = kwargs or {}
    if func in METADATA:
        with DisableTorchFunction():
            return func(*args, **kwargs)
    if func in cls.refused:
        raise RuntimeError(f"{name_of(func)} of {cls.what}")
    answer = cls.answered.get(func)
    if answer is not None:
        found = answer(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if list_length(func, args, kwargs) > 1:
        return one_by_one(func, args, kwargs)
    return _run(func, args, kwargs)


def _dispatch(
    cls: type[StandIn], func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Called by torch where no __torch_function__ is: for what C++ does by itself."""
    if func in (aten.detach.default, aten.alias.default):
        return make(type(args[0]), args[0]._strata_values)
    return _run(func, args, kwargs or {}, writes=func._schema.is_mutable)


class StandIn(torch.Tensor):
    """Shape, dtype and device of values that are elsewhere."""

    _strata_values: Any
    what = "a tensor without memory, which strata reads when it is asked for: use a copy (clone())"
    answered: Mapping[Function, Callable[..., Any]]
    refused = RAW | {
        torch.Tensor.requires_grad_,
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    }

    __torch_function__: Any = classmethod(_call)
    __torch_dispatch__: Any = classmethod(_dispatch)

    def __copy__(self) -> StandIn:
        """The same values, as torch's copies share memory."""
        return make(type(self), self._strata_values)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor in ordinary memory."""
        return cast(torch.Tensor, memo.setdefault(id(self), self.clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor; `torch.save` comes here."""
        if not self.is_contiguous():  # a transposed view
            return self.clone().__reduce_ex__(protocol)
        values = self._strata_values
        return saved_tensor(self, id(values) | UNREACHABLE, partial(own_mapping.copy, self))


Kind = TypeVar("Kind", bound=StandIn)


def make(cls: type[Kind], values: Values) -> Kind:
    """A tensor of this class that stands for the values."""
    made: Any = make_wrapper(cls, values.shape, dtype=values.dtype, device=values.device)
    made._strata_values = values
    return cast(Kind, made)


# What is known without the values -----------------------------------------------------------------


def _itself(self: Any, *args: Any) -> Any:
    """detach, data: it has no graph."""
    return NotImplemented if args else self


def _converted(func: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    known = isinstance(self, StandIn) and changes_nothing(func, self, *args, **kwargs)
    return self if known else NotImplemented


def _compatible(self: Any, other: Any) -> Any:
    return True if other is self else NotImplemented


def _represent(self: Any, **kwargs: Any) -> Any:
    try:
        values = self._strata_values.open()
    except RuntimeError as gone:
        return f"<{gone}>"
    return values.__repr__(**kwargs)


def _to_numpy(func: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy, which refuses to be written to: writes could not reach the values."""
    array = func(self.clone(), *args, **kwargs)
    array.flags.writeable = False
    return array


def _storage(itemsize: int | None, self: Any) -> PagedStorage:
    values = self._strata_values
    return PagedStorage(
        id(values) | UNREACHABLE, self.nbytes, self.device, itemsize or self.itemsize
    )


def _address(self: Any) -> int:
    return id(self._strata_values) | UNREACHABLE


def with_func(
    found: Iterable[Function], answer: Callable[..., Any]
) -> dict[Function, Callable[..., Any]]:
    """Answers that are told which function was asked."""
    return {func: partial(answer, func) for func in found}


StandIn.answered = {
    torch.Tensor.detach: _itself,
    torch.Tensor.detach_: _itself,
    torch.Tensor.data.__get__: _itself,  # type: ignore[attr-defined]
    **with_func(CONVERSIONS, _converted),
    compatible: _compatible,
    # For comparing.
    torch.Tensor.untyped_storage: partial(_storage, 1),
    torch.Tensor.storage: partial(_storage, None),
    typed_storage: partial(_storage, None),
    torch.Tensor.data_ptr: _address,
    # Not for subclasses, torch says.
    torch.Tensor.__repr__: _represent,
    torch.Tensor.tolist: lambda self: self._strata_values.open().tolist(),
    **with_func((torch.Tensor.numpy, torch.Tensor.__array__), _to_numpy),
}


# Everything else ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Opened:
    stand_in: StandIn
    values: torch.Tensor
    version: int


def _run(func: Function, args: tuple[Any, ...], kwargs: Any, writes: bool = False) -> Any:
    """Runs an operation on the true values, and tells their owners what it changed. `writes`: it
    may, and does not raise version counters."""
    opened: dict[int, _Opened] = {}

    def values_of(stand_in: StandIn) -> torch.Tensor:
        owner = stand_in._strata_values
        if id(owner) not in opened:
            values = owner.open()
            opened[id(owner)] = _Opened(stand_in, values, values._version)
        return opened[id(owner)].values

    def stand_in_of(tensor: torch.Tensor) -> torch.Tensor:
        return next((o.stand_in for o in opened.values() if o.values is tensor), tensor)

    plain = replaced((args, kwargs), StandIn, values_of)
    result = replaced(func(*plain[0], **plain[1]), torch.Tensor, stand_in_of)
    for one in opened.values():
        changed = writes or one.values._version != one.version
        one.stand_in._strata_values.close(one.values, changed)
    return result


def replaced(value: Any, kind: type, put: Callable[[Any], Any]) -> Any:
    """Arguments, or results, with others in the place of tensors of a class."""
    if isinstance(value, kind):
        return put(value)
    if type(value) is tuple or type(value) is list:
        return type(value)(replaced(item, kind, put) for item in value)
    if type(value) is dict:
        return {key: replaced(item, kind, put) for key, item in value.items()}
    return value
