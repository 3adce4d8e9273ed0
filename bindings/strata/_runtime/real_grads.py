"""The real `grad` of a parameter, where autograd leaves what it has completed.

grad = real_grad(parameter)     # whatever class the parameter has at the moment
"""

from typing import Any

import torch

from .._torch_compat import DisableTorchFunction

_grad: Any = torch.Tensor.grad


def real_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """What autograd left there."""
    with DisableTorchFunction():
        grad: torch.Tensor | None = _grad.__get__(parameter)
    return grad


def set_real(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Raises RuntimeError, as torch does, for what is no gradient of the parameter."""
    with DisableTorchFunction():
        _grad.__set__(parameter, grad)


def drop_real(parameter: torch.Tensor) -> None:
    """Removes it."""
    set_real(parameter, None)
