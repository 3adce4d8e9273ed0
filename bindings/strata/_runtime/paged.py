"""Parameters outside their module: every read gives the true value, or raises.

While its unit is entered by its own module, a parameter is a plain nn.Parameter and costs nothing.
At any other time its class is PagedParameter: each torch operation on it enters its unit, runs, and
leaves. What such an operation returns as a view of the parameter (`p.data`, `p.view(-1)`, `p[0]`)
is a PagedTensor, which does the same; so does a view that a module's forward leaves behind, which
escapes.py finds.

Note [Aliases]. A view shares the parameter's address range; that is how it is recognised, whatever
operation made it. Operations that would give raw memory away (`__dlpack__`, elements of a storage)
raise, and `data_ptr` gives an address for comparing, which nobody can follow (paged_storage.py).
Limits: `torch.tensor(p)`, `torch.as_tensor(p)`, `other.data = p.data` and `torch.func.grad(f)(p)`
go past a tensor's class, so nothing can be done for them here; what they see is true only while the
unit is on the device.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from .._torch_compat import (
    DisableTorchFunction,
    compatible,
    rebuild_parameter,
    typed_storage,
)
from . import own_mapping
from .paged_collectives import collective, is_collective
from .paged_run import in_step, is_paged, paged_in, run
from .paged_storage import RAW_MEMORY, PagedStorage, address_of, saved_tensor
from .stand_in import StandIn
from .tensor_functions import (
    CONVERSIONS,
    METADATA,
    Function,
    changes_nothing,
    functions,
    name_of,
)
from .wrapped import Slot


def _call(
    cls: type, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Called by torch instead of any operation that has a paged tensor among its arguments."""
    if any(issubclass(t, StandIn) for t in types):  # its turn comes first
        return NotImplemented
    if func in METADATA:
        with DisableTorchFunction():
            return func(*args, **(kwargs or {}))
    if func in _REFUSED:
        raise RuntimeError(f"{name_of(func)} {RAW_MEMORY}")
    if (special := _SPECIAL.get(func)) is None:
        special = collective if is_collective(func) else run
    return special(func, args, kwargs or {})


class PagedTensor(torch.Tensor):
    """A view of a paged parameter, as an operation outside its module returned it."""

    _strata: Slot
    _strata_is_paged: ClassVar[bool] = True

    __torch_function__: Any = classmethod(_call)

    def __copy__(self) -> torch.Tensor:
        """A plain tensor in ordinary memory."""
        return _plain_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor in ordinary memory."""
        return memo.setdefault(id(self), _plain_copy(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor; `torch.save` comes here."""
        return _saved(self, protocol)


class PagedParameter(nn.Parameter):
    """A parameter while its unit is not entered by its own module. Same object, other class."""

    _strata: Slot
    _strata_is_paged: ClassVar[bool] = True

    __torch_function__: Any = classmethod(_call)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, as gradients.py says."""
        slot = self._strata
        return slot.state.gradients.show(slot.index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        slot = self._strata
        slot.state.gradients.put(slot.index, value)

    @grad.deleter
    def grad(self) -> None:
        self._strata.state.gradients.drop(self._strata.index)

    def __copy__(self) -> nn.Parameter:
        """A plain parameter in ordinary memory."""
        return nn.Parameter(_plain_copy(self), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter in ordinary memory."""
        if id(self) not in memo:
            memo[id(self)] = copy.copy(self)
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain parameter."""
        return rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())


def make_paged(parameter: nn.Parameter) -> None:
    """From now on operations on the parameter enter its unit."""
    parameter.__class__ = PagedParameter


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    copied.__class__ = torch.Tensor
    return copied


def _saved(tensor: PagedTensor, protocol: Any) -> Any:
    """See Note [torch.save] of paged_storage.py. Views of a parameter share its storage there."""
    state, index = tensor._strata.state, tensor._strata.index
    alias = state.aliases[index]
    with DisableTorchFunction():
        simple = tensor.dtype == alias.dtype and not tensor.is_neg()
        offset = int(tensor.storage_offset() - alias.storage_offset())
    if not simple:
        return _plain_copy(tensor).__reduce_ex__(protocol)
    whole = state.params[index]
    read = partial(own_mapping.copy, whole)
    return saved_tensor(tensor, address_of(alias), read, offset, alias.nbytes)


# Operations that need more than entering ----------------------------------------------------------


def _copy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy_ into a contiguous range: exact float32 values to the master. See Note [Writes] of
    paged_run.py."""
    target = args[0]
    source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if not is_paged(target) or not isinstance(source, torch.Tensor):
        return run(func, args, kwargs)
    with DisableTorchFunction():
        tracked = torch.is_grad_enabled() and (target.requires_grad or source.requires_grad)
        simple = target.is_contiguous() and not tracked and not source.is_complex()
    if not simple:
        return run(func, args, kwargs)
    slot: Slot = target._strata
    in_step(slot.state, func)
    if slot.state.session.entered(slot.unit.index):  # who has it sees the device
        return run(func, args, kwargs)
    value = source.detach().expand(target.shape)
    if is_paged(value):
        value = value.clone()
    with DisableTorchFunction():
        offset = target.storage_offset() - slot.state.aliases[slot.index].storage_offset()
        slot.state.write(slot.index, value, offset=offset)
        torch.autograd.graph.increment_version(target)
        slot.state.written[slot.index] = slot.state.params[slot.index]._version
    return target


def _set_data(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`p.data = value`: takes the values over; what `p.data` was before keeps its own. See Note
    [Moves] of escapes.py. `model.half()` and `.cuda()` end here too."""
    target, value = args
    if value is target or (is_paged(target) and _is_same_view(target, value)):
        return None
    if type(target) is not PagedParameter:
        if is_paged(value):  # an ordinary tensor is to share the memory of a paged one
            raise RuntimeError(
                "a tensor cannot take the memory of a paged parameter: use p.clone()"
            )
        with DisableTorchFunction():
            func(target, value)
        target._strata.state.views.leave(target)
        return None
    slot = target._strata
    slot.state.check_like(slot.index, value)
    with torch.no_grad():
        slot.state.views.move(slot.index, target.clone)
        target.copy_(value)
    return None


def _is_same_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    with DisableTorchFunction():
        return (
            tensor.data_ptr() == other.data_ptr()
            and (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            and (tensor.stride(), tensor.is_neg()) == (other.stride(), other.is_neg())
        )


def _set_requires_grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Freezing a parameter is fine: no gradient, no update. A frozen one has no pages to train."""
    target = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if type(target) is PagedParameter and wanted:
        slot = target._strata
        if not slot.state.config["params"][slot.index]["trainable"] and not target.requires_grad:
            raise RuntimeError(
                f"parameter {_label(target)} was frozen when strata.wrap() was called, so there is "
                "no room for its gradient: set requires_grad before wrapping"
            )
    with DisableTorchFunction():
        return func(*args, **kwargs)


def _gradients(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: reads no parameter itself, only says which gradients are wanted."""
    names = ("outputs", "inputs", "grad_outputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = args[len(names) :]
    edges = _edges(given.pop("inputs"))
    outputs = given.pop("outputs")
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if any(is_paged(t) for t in outputs):
        raise RuntimeError("torch.autograd.grad of a parameter itself is not supported by strata")
    return func(outputs, edges, given.pop("grad_outputs", None), *rest, **given)


def _backward(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.backward: `inputs`, of which no value is read, say which gradients are wanted.
    torch 2.8 does not ask here, and finds the parameters itself."""
    inputs = kwargs.get("inputs")
    if inputs is not None:
        kwargs = {**kwargs, "inputs": _edges(inputs, retained=True)}
    if next(paged_in(args[0]), None) is not None:  # of a parameter itself
        return run(func, args, kwargs)
    return func(*args, **kwargs)


def _edges(inputs: Any, retained: bool = False) -> list[Any]:
    """Where gradients are wanted, without the tensors of a model. `retained`: those that are no
    leaves are to keep theirs, as in torch's backward()."""
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with DisableTorchFunction():
        for view in inputs if retained else ():
            if type(view) is PagedTensor and view.requires_grad:
                view.retain_grad()
        return [get_gradient_edge(t) if is_paged(t) else t for t in inputs]


def _iterate(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(args[0].unbind(0))


def _represent(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prints as what it stands for."""
    plain = _plain_copy(args[0])
    return func(plain.requires_grad_(args[0].requires_grad), *args[1:], **kwargs)


def _to_numpy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy, which refuses to be written to: writes could not reach the parameter."""
    with DisableTorchFunction():
        if args[0].requires_grad:
            return func(*args, **kwargs)  # torch's own error
    array = func(args[0].clone(), *args[1:], **kwargs)
    array.flags.writeable = False
    return array


def _converted(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself, without entering its unit, where it has that dtype and is there."""
    known = is_paged(args[0]) and changes_nothing(func, *args, **kwargs)
    return args[0] if known else run(func, args, kwargs)


def _compatible(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asked by Module.to() and its like: False would exchange the parameter for another one, which
    no optimizer knows; of what it cannot become _set_data() tells."""
    return type(args[0]) is PagedParameter or run(func, args, kwargs)


def _address(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    with DisableTorchFunction():
        return address_of(args[0])


def _storage(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedStorage:
    """What tells the memory of parameters apart, and no more."""
    slot: Slot = args[0]._strata
    alias = slot.state.aliases[slot.index]
    itemsize = 1 if func is torch.Tensor.untyped_storage else alias.itemsize
    return PagedStorage(address_of(alias), alias.nbytes, alias.device, itemsize)


def _label(tensor: Any) -> str:
    slot: Slot = tensor._strata
    return repr(slot.state.names[slot.index])


_REFUSED = functions(
    "__dlpack__ share_memory_ resize_ resize_as_ detach_",
    "__cuda_array_interface__",
)
_SPECIAL: dict[Function, Callable[..., Any]] = {
    torch.Tensor.copy_: _copy,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    **dict.fromkeys(CONVERSIONS, _converted),
    compatible: _compatible,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.untyped_storage: _storage,
    torch.Tensor.storage: _storage,
    typed_storage: _storage,
    torch.Tensor.__iter__: _iterate,
    torch.Tensor.__repr__: _represent,
    torch.Tensor.numpy: _to_numpy,
    torch.autograd.grad: _gradients,
    torch.autograd.backward: _backward,
    torch.Tensor.__array__: _to_numpy,
}
