"""Operations of torch as __torch_function__ is given them, by name.

functions("size dim", "shape")     # methods of Tensor, and getters of its properties
"""

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def functions(methods: str, properties: str = "") -> frozenset[Function]:
    """Tensor's methods, and the getters of its properties, as torch passes them."""
    found = [getattr(torch.Tensor, name) for name in methods.split()]
    found += [getattr(torch.Tensor, name).__get__ for name in properties.split()]
    return frozenset(found)


def name_of(func: Function) -> str:
    """As torch names it."""
    return getattr(func, "__name__", repr(func))


# These read no element, nor give away where one lies.
METADATA = functions(
    "backward size dim ndimension numel nelement stride storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed get_device __hash__ __len__ register_hook "
    "register_post_accumulate_grad_hook retain_grad is_inference is_pinned is_same_size is_shared",
    "shape dtype device layout requires_grad is_leaf grad_fn ndim _version output_nr is_cuda "
    "is_cpu is_sparse is_sparse_csr is_meta is_quantized is_nested is_mkldnn is_xpu is_mps "
    "itemsize nbytes _backward_hooks _post_accumulate_grad_hooks",
)
