"""Functions of torch.distributed on parameters outside their module, where torch asks for that.

    collective(distributed.all_reduce, (paged,), {})     # the parameter is what came of it

They raise no version counter, so nobody would see that they write: they get copies, and what
changed there is written as `copy_()` writes it.
"""

from typing import Any

import torch

from .paged_run import mapped
from .tensor_functions import Function, name_of

_LATER = ("isend", "irecv")


def is_collective(func: Function) -> bool:
    """Whether it is one of torch.distributed's own functions."""
    return getattr(func, "__module__", None) == "torch.distributed.distributed_c10d"


def collective(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs it to its end. Raises RuntimeError where it would go on behind the call."""
    if kwargs.get("async_op") or name_of(func) in _LATER:
        raise RuntimeError(
            f"{name_of(func)} of a parameter outside its module goes on behind the call, when the "
            "parameter may lie elsewhere: leave async_op=True out, or give it a copy (p.clone()) "
            "and write that back with p.data.copy_()"
        )
    copies: dict[int, tuple[Any, torch.Tensor]] = {}

    def copy_of(tensor: Any) -> torch.Tensor:
        return copies.setdefault(id(tensor), (tensor, tensor.detach().clone()))[1]

    with torch.no_grad():
        result = func(*mapped(copy_of, args), **mapped(copy_of, kwargs))
        for tensor, copy in copies.values():
            if not torch.equal(tensor, copy):
                tensor.detach().copy_(copy)
    return result
