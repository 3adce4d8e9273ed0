"""What p.grad showed once: a parameter's gradient, and later what was left of it.

shown = Shown(state.gradients, index)
values = shown.open()                # the true ones
...
shown.close(values, changed=True)
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .gradients import Gradients


class Shown:
    """One gradient, behind all tensors that stand for it."""

    __slots__ = ("__weakref__", "gradients", "index", "left", "tensor", "values")

    def __init__(self, gradients: Gradients, index: int) -> None:
        self.gradients = gradients
        self.index = index
        self.tensor: weakref.ref[torch.Tensor] | None = None  # what p.grad is
        self.left = False  # the parameter has another gradient by now, or none
        self.values: torch.Tensor | None = None  # ... and this is what it was; None: it is lost

    @property
    def shape(self) -> torch.Size:
        """Of the gradient."""
        return self.gradients.shape(self.index)

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient: float32 where sums are."""
        return self.gradients.dtype(self.index)

    @property
    def device(self) -> torch.device:
        """That it is on."""
        return self.gradients.device

    def leave(self, values: torch.Tensor | None) -> None:
        """The parameter gets another gradient, or none."""
        self.left, self.values = True, values

    def open(self) -> torch.Tensor:
        """The true values. close() comes next."""
        self.gradients.sort_out()
        if not self.left:
            return self.gradients.open(self.index)
        if self.values is None:
            raise RuntimeError(
                f"this was a gradient of {self.gradients.name(self.index)}, and was used by its "
                "update or forgotten: read or copy it (p.grad.clone()) ahead of optimizer.step()"
            )
        return self.values

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """Something was done with what open() returned."""
        if not self.left:
            self.gradients.close(self.index, values, changed)


def shown_by(tensor: Any) -> Shown | None:
    """The gradient that a tensor stands for, where it still is the parameter's."""
    shown = getattr(tensor, "_strata_values", None)
    return shown if isinstance(shown, Shown) and not shown.left else None
