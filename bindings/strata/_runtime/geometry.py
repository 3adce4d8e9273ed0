"""How a view lies in the memory of its tensor, and the same view of another one.

geometry = Geometry(view)
geometry.over(other)         # of the same bytes
"""

import torch

from .._torch_compat import conj_view, neg_view


class Geometry:
    """How a view lies in the memory of its parameter. It does not count as a tensor over it."""

    __slots__ = ("conj", "dtype", "neg", "offset", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        """REQUIRES: the class of the tensor does not interfere."""
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def over(self, alias: torch.Tensor) -> torch.Tensor:
        """The view again."""
        if self.dtype == alias.dtype:
            view = alias.as_strided(self.shape, self.stride, self.offset)
            return neg_view(view) if self.neg else view
        view = torch.empty(0, dtype=self.dtype, device=alias.device)
        with torch.no_grad():
            view.set_(alias.untyped_storage(), self.offset, self.shape, self.stride)
            if self.conj:
                view = conj_view(view)
            return neg_view(view) if self.neg else view
