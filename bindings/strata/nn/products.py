"""Matrix products whose sums are float32 where their factors are 16-bit, in one pass over them.

    add_product(total, left, right)      # total += left @ right
    set_product(out, left, right)        # out = left @ right
    full_linear(states, weight, bias)    # F.linear(), float32 at least

cuBLAS multiplies 16-bit matrices into a float32 one, and adds to what that holds while it writes
it. torch offers this as `out_dtype`, on GPUs alone. On the host such products are rounded to 16
bits first, and added in a second pass. Threads: no state.
"""

import torch
from torch.nn import functional as F

OUT_DTYPE = {"cuda"}  # the types of devices on which torch knows `out_dtype`
SHORT = (torch.bfloat16, torch.float16)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`, which is of their dtype or wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _widens(left, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def set_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Writes left @ right to `out`, which is of any dtype."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif _widens(left, out.dtype):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


def full_linear(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """F.linear() of one dtype, as float32 at least, in memory that the caller may write to."""
    full = torch.promote_types(states.dtype, torch.float32)
    if not _widens(states, full):
        return F.linear(states, weight, bias).to(full)
    wide: torch.Tensor = torch.mm(states, weight.t(), out_dtype=full)
    return wide if bias is None else wide.add_(bias)


def _widens(factor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch gives products of such factors as `dtype` without rounding them first."""
    return dtype == torch.float32 and factor.dtype in SHORT and factor.device.type in OUT_DTYPE
