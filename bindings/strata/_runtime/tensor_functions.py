"""Operations of torch as __torch_function__ is given them, by name.

functions("size dim", "shape")     # methods of Tensor, and getters of its properties
"""

from collections.abc import Callable
from typing import Any

import torch

from .._torch_compat import DisableTorchFunction, parse_to

Function = Callable[..., Any]


def functions(methods: str, properties: str = "") -> frozenset[Function]:
    """Tensor's methods, and the getters of its properties, as torch passes them."""
    found = [getattr(torch.Tensor, name) for name in methods.split()]
    found += [getattr(torch.Tensor, name).__get__ for name in properties.split()]
    return frozenset(found)


def may_write(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether an operation may change its arguments, going by torch's names."""
    name = name_of(func)
    return (
        "out" in kwargs
        or name in ("__set__", "__setitem__")
        or (name.startswith("__i") if name.startswith("__") else name.endswith("_"))
    )


def name_of(func: Function) -> str:
    """As torch names it."""
    return getattr(func, "__name__", repr(func))


def optimizer_advice(func: Function) -> str:
    """What to do where an operation that changes many tensors at once, as optimizers do, finds no
    room for them; "": it is another one."""
    name = name_of(func)
    if not (name.startswith(("_foreach_", "_fused_")) and name.endswith("_")):
        return ""
    return (
        "if an optimizer steps here, take the one that strata.wrap() returned, which goes through "
        "pages (for a Trainer: optimizers=(optimizer, None))"
    )


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
