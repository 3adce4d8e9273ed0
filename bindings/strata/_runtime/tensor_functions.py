"""Operations of torch as __torch_function__ is given them, by name.

functions("size dim", "shape")     # methods of Tensor, and getters of its properties
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .._torch_compat import DisableTorchFunction, OpOverload, OpOverloadPacket, parse_to

Function = Callable[..., Any]


def functions(methods: str, properties: str = "") -> frozenset[Function]:
    """Tensor's methods, and the getters of its properties, as torch passes them."""
    found = [getattr(torch.Tensor, name) for name in methods.split()]
    found += [getattr(torch.Tensor, name).__get__ for name in properties.split()]
    return frozenset(found)


def name_of(func: Function) -> str:
    """As torch names it; an attribute that is assigned to, as users write it."""
    name = getattr(func, "__name__", repr(func))
    return f"assigning to .{func.__self__.__name__}" if name == "__set__" else name  # type: ignore[attr-defined]


# What an operation writes -------------------------------------------------------------------------


def written(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation may change, nested as they are."""
    writes = _writes(func)
    if writes is None or kwargs.get("inplace") or kwargs.get("max_norm") is not None:
        return [*args, *kwargs.values()]
    named = [value for name, value in kwargs.items() if name in writes or name == "out"]
    return [value for place, value in enumerate(args) if place in writes] + named


_OPERATORS = ("add", "and", "div", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
_WRITE_FIRST = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


@functools.cache
def _writes(func: Function) -> frozenset[int | str] | None:
    """The places and names of arguments that an operation may change: as its schemas say. None: it
    has none, and torch's names say that it changes some."""
    name = name_of(func)
    if name in _WRITE_FIRST:
        return frozenset((0,))
    schemas = _schemas(func)
    if not schemas:
        return None if name.endswith("_") and not name.startswith("__") else frozenset()
    places: set[int | str] = set()
    for schema in schemas:
        for place, argument in enumerate(schema.arguments):
            if argument.is_write:
                places |= {argument.name, "input"} if argument.name == "self" else {argument.name}
                if not argument.kwarg_only:
                    places.add(place)
    return frozenset(places)


def _schemas(func: Function) -> list[Any]:
    """Of all overloads of an operation of ATen, or of a library of the user's."""
    if isinstance(func, OpOverload):
        return [func._schema]
    packet: Any = func
    if not isinstance(func, OpOverloadPacket):
        if inspect.isfunction(func):  # of Python's, which calls several of ATen
            return []
        packet = getattr(torch.ops.aten, name_of(func), None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


# Operations on lists ------------------------------------------------------------------------------


def list_length(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tensors an operation is given that does the same with each; 0 for all others."""
    if not name_of(func).startswith(("_foreach_", "_fused_")):
        return 0
    lists = (value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    return len(next(lists, ()))


def one_by_one(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on lists, for one tensor after the other: no more than one is in memory."""
    count = list_length(func, args, kwargs)

    def item(value: Any, i: int) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [value[i]]
        # A tensor of numbers in the place of a list of them.
        of_each = isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == count
        return value[i : i + 1] if of_each else value

    results = [
        func(*(item(a, i) for a in args), **{k: item(v, i) for k, v in kwargs.items()})
        for i in range(count)
    ]
    if any(found is None for found in results):  # in place, and of some versions of torch
        return None
    return [tensor for found in results for tensor in found]


# These read no element, nor give away where one lies.
METADATA = functions(
    "backward size dim ndimension numel nelement stride storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed get_device __hash__ __len__ register_hook "
    "register_post_accumulate_grad_hook retain_grad is_inference is_pinned is_same_size is_shared",
    "shape dtype device layout requires_grad is_leaf grad_fn ndim _version output_nr is_cuda "
    "is_cpu is_sparse is_sparse_csr is_meta is_quantized is_nested is_mkldnn is_xpu is_mps "
    "itemsize nbytes _backward_hooks _post_accumulate_grad_hooks",
)

# What returns the tensor itself where it has that dtype already.
_TO_DTYPE: dict[Function, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}


def changes_nothing(func: Function, tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a function of CONVERSIONS would return the tensor itself, which has that dtype and is
    there. Models are moved so by whoever does not know where they are."""
    with DisableTorchFunction():
        if func is torch.Tensor.to:
            if "copy" in kwargs or any(a is True for a in args[2:]):
                return False
            try:
                device, dtype, _, layout = parse_to(*args, **kwargs)
            except (TypeError, RuntimeError):
                return False
            there = device is None or device == tensor.device
            return there and dtype in (None, tensor.dtype) and layout in _KEEPING
        if args or kwargs:
            return False
        if func is torch.Tensor.contiguous:
            return bool(tensor.is_contiguous())
        if func is torch.Tensor.cpu:
            return bool(tensor.device.type == "cpu")
        return bool(tensor.dtype == _TO_DTYPE[func])


_KEEPING = (None, torch.preserve_format)
CONVERSIONS: tuple[Function, ...] = (
    *(torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.contiguous),
    *_TO_DTYPE,
)
