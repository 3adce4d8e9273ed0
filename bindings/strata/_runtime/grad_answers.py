"""What is known of a gradient without its values, and what can be done to it later, by the update.

    answer = ANSWERED.get(func)             # func: as __torch_function__ is given it
    found = answer(*args, **kwargs)         # NotImplemented: only the values tell

Norms, and whether all is finite, come from sums of squares that were taken while the gradient
landed. Scaling in place is noted, and applied with PyTorch's rounding by whatever reads or uses the
gradient from then on; the next scaling has the core write it. It is noted only where that is sure
to be, bit for bit, what PyTorch does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from .._torch_compat import (
    DisableTorchFunction,
    check_and_unscale,
    foreach_div,
    foreach_mul,
    foreach_norm,
    foreach_zero,
)
from .grad_shown import Shown, shown_by
from .stand_in import StandIn, with_func
from .tensor_functions import CONVERSIONS, Function, changes_nothing

Answer = Callable[..., Any]

_TINY = 1e-30  # norms below may be of numbers that rounding made zero


# What is known without the values -----------------------------------------------------------------


def _norm_2(tensor: Any, dim: Any, keepdim: Any, out: Any, dtype: torch.dtype | None) -> Any:
    """The 2-norm of all elements."""
    shown = shown_by(tensor)
    if shown is None:
        return NotImplemented
    if dim is not None or keepdim or out is not None:
        return _refuse_part(shown)
    own = shown.dtype
    squares = shown.gradients.squares(shown.index)
    if squares is None:
        return NotImplemented
    total, scaled = squares
    # As where torch adds squares up, in float32 unless more is asked for.
    too_large = total > torch.finfo(torch.float32).max and dtype is not torch.float64
    norm = math.inf if too_large else math.sqrt(total)
    if scaled:
        # Scaled elements are rounded, which the sum does not know: as much as one of this dtype is.
        wider = dtype is not None and torch.finfo(dtype).eps < torch.finfo(own).eps
        if wider or own is torch.float16 or 0 < norm < _TINY:
            return _refuse_part(shown)
    device = shown.device
    return torch.tensor(norm, dtype=torch.float64, device=device).to(dtype or own)


def _other_norm(tensor: Any) -> Any:
    """From the values, where this process has all of them."""
    shown = shown_by(tensor)
    return NotImplemented if shown is None else _refuse_part(shown)


def _refuse_part(shown: Shown) -> Any:
    """Raises RuntimeError where a norm would be that of a shard, and each process would have
    another one."""
    if shown.gradients.is_shard(shown.index):
        raise RuntimeError(
            f"this norm of the gradient of {shown.gradients.name(shown.index)}, a DTensor, would "
            "be that of this process's shard: only the 2-norm of all elements is that of the whole"
        )
    return NotImplemented


def _vector_norm(
    x: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: Any = False,
    *,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    return _norm_2(x, dim, keepdim, out, dtype) if ord == 2 else _other_norm(x)


def _matrix_or_vector_norm(
    A: Any,  # noqa: N803  (as torch names it)
    ord: Any = None,
    dim: Any = None,
    keepdim: Any = False,
    *,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    flat = ord is None or (ord == 2 and A.dim() == 1) or (ord == "fro" and A.dim() == 2)
    return _norm_2(A, dim, keepdim, out, dtype) if flat else _other_norm(A)


def _torch_norm(
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: Any = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    found = p in (2, "fro", None)
    return _norm_2(input, dim, keepdim, out, dtype) if found else _other_norm(input)


def _tensor_norm(
    self: Any, p: Any = "fro", dim: Any = None, keepdim: Any = False, dtype: Any = None
) -> Any:
    return _torch_norm(self, p, dim, keepdim, None, dtype)


def _foreach_norm(self: Any, ord: Any = 2, dtype: Any = None) -> Any:
    if len(self) != 1:
        return NotImplemented  # one by one
    found = _vector_norm(self[0], ord, dtype=dtype)
    return found if found is NotImplemented else [found]


def _is_finite(shown: Shown) -> bool | None:
    """Whether all elements are. None: only the values tell."""
    squares = shown.gradients.squares(shown.index)
    return None if squares is None else math.isfinite(squares[0])


def _all_finite(answer: bool, input: Any) -> Any:
    """isfinite, isnan, isinf: the same `answer` for all elements where they are finite."""
    shown = shown_by(input)
    if shown is None or not _is_finite(shown):
        return NotImplemented
    return torch.full(shown.shape, answer, dtype=torch.bool, device=shown.device)


# What is noted, and done by the update ------------------------------------------------------------


def _scaled(shown: Shown, factor: float, divides: bool) -> bool:
    """Notes it, where it is sure to be what the operation would do to each element."""
    if factor == 1.0:
        return True
    by = (1.0 / factor if factor else math.inf) if divides else factor
    squares = shown.gradients.squares(shown.index)
    if squares is None or math.isinf(by) or math.isinf(factor):
        return False
    norm = math.sqrt(squares[0]) * abs(by)
    # No element may become infinite, of which the sum would not tell.
    if math.isfinite(squares[0]) and norm >= torch.finfo(shown.dtype).max:
        return False
    return shown.gradients.scale(shown.index, factor, divides)


def _factor(shown: Shown, value: Any, divides: bool, rounds: bool) -> float | None:
    """What torch multiplies each element with, in float32, for a number or a tensor of one. None:
    it does something else. `rounds`: numbers of Python become the gradient's dtype first.

    A GPU's kernels may round a number or not, and divide or multiply with the inverse: there a
    factor is known only where all that is the same. Ranks have no values that would differ."""
    on_gpu = shown.device.type != "cpu" and not shown.gradients.hidden
    # Of two tensors without dimensions the wider dtype is computed in.
    same_kind = isinstance(value, torch.Tensor) and value.dtype in (shown.dtype, torch.float32)
    if not shown.shape and not same_kind:
        return None
    is_number = isinstance(value, bool | int | float)
    if isinstance(value, torch.Tensor):
        if isinstance(value, StandIn) or value.dim() != 0 or value.is_complex():
            return None
        if value.requires_grad and torch.is_grad_enabled():
            return None
    elif not is_number:
        return None
    factor = ctypes.c_float(value if is_number else value.item()).value
    rounded = torch.tensor(factor, dtype=shown.dtype).item()
    if on_gpu and (rounded != factor or (divides and not _is_power_of_two(factor))):
        return None
    return rounded if rounds and is_number else factor


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


def _scale(divides: bool, self: Any, other: Any = None, **kwargs: Any) -> Any:
    """mul_ and div_."""
    shown = shown_by(self)
    if shown is None or kwargs:
        return NotImplemented
    factor = _factor(shown, other, divides, rounds=False)
    if factor is None or not _scaled(shown, factor, divides):
        return NotImplemented
    return self


def _foreach_scale(divides: bool, self: Any, other: Any = None, **kwargs: Any) -> Any:
    """_foreach_mul_ and _foreach_div_, of one gradient."""
    if len(self) != 1 or kwargs:
        return NotImplemented
    shown = shown_by(self[0])
    other = other[0] if isinstance(other, list | tuple) else other
    rounds = not divides and not isinstance(other, torch.Tensor)
    factor = None if shown is None else _factor(shown, other, divides, rounds)
    if shown is None or factor is None or not _scaled(shown, factor, divides):
        return NotImplemented
    return [self[0]]


def _unscale(self: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """What torch's GradScaler does to all gradients at once."""
    factor = ctypes.c_float(inv_scale.item()).value
    for tensor in self:
        shown = getattr(tensor, "_strata_values", None)
        if not isinstance(shown, Shown):
            check_and_unscale([tensor], found_inf, inv_scale)
            continue
        finite = None if shown.left else _is_finite(shown)
        if finite is not None and _scaled(shown, factor, False):
            if not finite:
                found_inf.fill_(1.0)
            continue
        if finite is False:  # of a shard: the infinity may be another process's
            found_inf.fill_(1.0)
        values = shown.open()
        check_and_unscale([values], found_inf, inv_scale)
        shown.close(values, changed=True)


def _zero(self: Any) -> Any:
    shown = shown_by(self)
    if shown is None:
        return NotImplemented
    shown.gradients.zero(shown.index)
    return self


def _foreach_zero(self: Any) -> Any:
    return [tensor.zero_() for tensor in self]


# What changes nothing -----------------------------------------------------------------------------


def _converted(func: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    known = shown_by(self) is not None and changes_nothing(func, self, *args, **kwargs)
    return self if known else NotImplemented


def _set_data(self: Any, value: torch.Tensor) -> Any:
    """p.grad.data = value."""
    if value is self:
        return None
    shown = shown_by(self)
    if shown is None:
        return NotImplemented
    return shown.gradients.put(shown.index, value)


def _requires_grad(self: Any, requires_grad: bool = True) -> Any:
    if requires_grad:
        raise RuntimeError("p.grad of a wrapped model has no graph: use p.grad.clone()")
    return self


def _like(func: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """zeros_like, new_empty and the like, which read no element."""
    shown = shown_by(self)
    stand_in = None if shown is None else shown.gradients.like(shown.index)
    if stand_in is None:
        return NotImplemented
    with DisableTorchFunction():
        return func(stand_in, *args, **kwargs)


def _methods(names: Iterable[str], answer: Answer) -> dict[Function, Answer]:
    return {getattr(torch.Tensor, name): answer for name in names}


_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like randint_like"
_NEW = "new_zeros new_ones new_empty new_full new_empty_strided new_tensor"
ANSWERED: dict[Function, Answer] = {
    **StandIn.answered,
    # From the sums that were taken while gradients landed.
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _matrix_or_vector_norm,
    torch.norm: _torch_norm,
    torch.Tensor.norm: _tensor_norm,
    foreach_norm: _foreach_norm,
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), partial(_all_finite, True)),
    **dict.fromkeys((torch.isnan, torch.Tensor.isnan), partial(_all_finite, False)),
    **dict.fromkeys((torch.isinf, torch.Tensor.isinf), partial(_all_finite, False)),
    # Noted for the update.
    **_methods(("mul_", "multiply_"), partial(_scale, False)),
    **_methods(("div_", "divide_", "true_divide_"), partial(_scale, True)),
    foreach_mul: partial(_foreach_scale, False),
    foreach_div: partial(_foreach_scale, True),
    check_and_unscale: _unscale,
    torch.Tensor.zero_: _zero,
    torch.zero_: _zero,
    foreach_zero: _foreach_zero,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **with_func(CONVERSIONS, _converted),
    torch.Tensor.requires_grad_: _requires_grad,
    torch.Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    # Shape, dtype and device only.
    **with_func((getattr(torch, name) for name in _LIKE.split()), _like),
    **with_func((getattr(torch.Tensor, name) for name in _NEW.split()), _like),
}
