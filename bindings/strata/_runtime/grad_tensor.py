"""What `p.grad` of a wrapped parameter is: a tensor without memory, which answers.

    p.grad.norm()           # from the sum of squares that was taken while the gradient landed
    p.grad.mul_(0.5)        # noted, and done by the update
    p.grad.abs().max()      # of the true values, read for this
    p.grad[0] = 0           # the true values are read, changed and written back

What is answered without the values is in the table of grad_answers.py. Everything else comes to
_run(), which puts a tensor with the true values in the place of the gradient, and takes over what
was changed in it. Where a view of that tensor lives on, the gradient is held there: gradients.py,
Note [Where a gradient is].

torch asks __torch_function__ ahead of autograd, so no graph keeps a tensor of this class. What C++
does by itself comes to __torch_dispatch__.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from .._torch_compat import DisableTorchFunction, make_wrapper
from .grad_answers import ANSWERED, Function
from .grad_shown import Shown
from .tensor_functions import METADATA, functions, name_of

if TYPE_CHECKING:
    from .gradients import Gradients

aten = torch.ops.aten
_REFUSED = functions(
    "data_ptr untyped_storage storage _typed_storage __dlpack__ share_memory_ resize_ resize_as_ "
    "set_",
    "__cuda_array_interface__",
)


def tensor_of(shown: Shown) -> PagedGradient:
    """What p.grad is: the same object for as long as somebody has it."""
    known = shown.tensor() if shown.tensor is not None else None
    if known is None:
        known = _make(shown)
        shown.tensor = weakref.ref(known)
    return cast(PagedGradient, known)


def _make(shown: Shown) -> PagedGradient:
    made: Any = make_wrapper(PagedGradient, shown.shape, dtype=shown.dtype, device=shown.device)
    made._strata_gradient = shown
    return cast(PagedGradient, made)


def _call(
    cls: type, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Called by torch instead of any operation that has a PagedGradient among its arguments."""
    kwargs = kwargs or {}
    if func in METADATA:
        with DisableTorchFunction():
            return func(*args, **kwargs)
    if func in _REFUSED:
        raise RuntimeError(
            f"{name_of(func)} of a gradient that rests in strata's pages, which have no address of "
            "their own: use p.grad.clone()"
        )
    answer = ANSWERED.get(func)
    if answer is not None:
        found = answer(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if name_of(func).startswith("_foreach_") and args and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    return _run(func, args, kwargs)


def _dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Called by torch where no __torch_function__ is: for what C++ does by itself."""
    if func in (aten.detach.default, aten.alias.default):
        return _make(args[0]._strata_gradient)
    return _run(func, args, kwargs or {}, writes=func._schema.is_mutable)


class PagedGradient(torch.Tensor):
    """The gradient of a wrapped parameter: its shape, dtype and device, and no memory."""

    _strata_gradient: Shown

    __torch_function__: Any = classmethod(_call)
    __torch_dispatch__: Any = classmethod(_dispatch)

    def shows(self, gradients: Gradients, index: int) -> bool:
        """Whether it is the gradient that this parameter has."""
        shown = self._strata_gradient
        return shown.gradients is gradients and shown.index == index and not shown.left

    def __copy__(self) -> PagedGradient:
        """The same gradient, as torch's copies share memory."""
        return _make(self._strata_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor in ordinary memory."""
        return cast(torch.Tensor, memo.setdefault(id(self), self.clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor; `torch.save` comes here."""
        return self.clone().__reduce_ex__(protocol)


@dataclass(slots=True, eq=False)
class _Opened:
    gradient: PagedGradient
    values: torch.Tensor
    version: int


def _run(func: Function, args: tuple[Any, ...], kwargs: Any, writes: bool = False) -> Any:
    """Runs an operation on the true values, and takes over what it changed. `writes`: it may, and
    does not raise version counters."""
    opened: dict[int, _Opened] = {}

    def values_of(gradient: PagedGradient) -> torch.Tensor:
        shown = gradient._strata_gradient
        if id(shown) not in opened:
            values = shown.open()
            opened[id(shown)] = _Opened(gradient, values, values._version)
        return opened[id(shown)].values

    def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
        return next((o.gradient for o in opened.values() if o.values is tensor), tensor)

    plain = _replaced((args, kwargs), PagedGradient, values_of)
    result = _replaced(func(*plain[0], **plain[1]), torch.Tensor, gradient_of)
    for one in opened.values():
        changed = writes or one.values._version != one.version
        one.gradient._strata_gradient.close(one.values, changed)
    return result


def _replaced(value: Any, kind: type, put: Callable[[Any], Any]) -> Any:
    """Arguments, or results, with others in the place of tensors of a class."""
    if isinstance(value, kind):
        return put(value)
    if type(value) is tuple or type(value) is list:
        return type(value)(_replaced(item, kind, put) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, kind, put) for key, item in value.items()}
    return value


def _one_by_one(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on lists, for one gradient after the other: no more than one is in memory."""
    count = len(args[0])

    def item(value: Any, i: int) -> Any:
        listed = isinstance(value, list | tuple) and len(value) == count
        return [value[i]] if listed else value

    results = [
        func(*(item(a, i) for a in args), **{k: item(v, i) for k, v in kwargs.items()})
        for i in range(count)
    ]
    if any(found is None for found in results):  # in place, and of some versions of torch
        return None
    return [tensor for found in results for tensor in found]
