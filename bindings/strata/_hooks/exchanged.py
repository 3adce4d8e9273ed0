"""What a forward finds in the place of its module's parameters.

    owned = Owned(module, "weight", parameter, index, address)
    if is_exchanged(state, owned): ...        # ahead of each forward

Note [Exchanged]. torch.func.functional_call puts tensors of the user's own in the place of
parameters, for one forward. Such a tensor needs no pages, so it is simply used. A module of which
all parameters are exchanged enters nothing. A unit is not recomputed where any is: the tensor is
gone by then.

A parameter that was exchanged for good is used by forwards without gradients. In training it is
refused: the optimizer does not know the new one, and a checkpoint would have the old one.

Limit: torch.func goes past the class of a tensor. A parameter that it is given itself, and that no
module reads, it reads as raw memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

from .._runtime.wrapped import Wrapped
from .._torch_compat import functional_call, is_transformed, transformed

_COPIES = "{name: p.detach().clone() for name, p in model.named_parameters()}"
FORBIDDEN = (
    "saved-tensor hooks are disabled here, by torch.func (grad, vjp, jacrev, hessian) or by the "
    "caller, and strata needs them to find parameters again in the backward: give the model "
    f"copies, torch.func.functional_call(model, {_COPIES}, args), or differentiate with "
    "torch.autograd.grad or torch.autograd.functional"
)
_call_code = functional_call.__code__


@dataclass(slots=True, eq=False)
class Owned:
    """A parameter, and where its module looks it up."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    index: int
    address: int


def is_exchanged(state: Wrapped, owned: Owned) -> bool:
    """Whether the forward will use another tensor. See Note [Exchanged].

    Raises RuntimeError where the result would not be what the user wants. REQUIRES: the class of a
    tensor does not interfere.
    """
    found = owned.module._parameters.get(owned.name)
    parameter, shards = owned.parameter, state.shards
    if found is parameter or (shards is not None and shards.shows(owned.index, found)):
        _check_own(state, owned)
        return False
    if found is None:
        found = owned.module.__dict__.get(owned.name)
        if not isinstance(found, torch.Tensor):
            if any(p is parameter for p in owned.module.parameters()):  # parametrised since
                return False
            _refuse(state, owned, "removed from its module", "put it back")
    if is_transformed(found) and state.find(_base(found).data_ptr()) >= 0:
        raise RuntimeError(
            f"torch.func was given parameter {state.names[owned.index]!r} itself, or a view of "
            f"it, whose memory strata moves: give it copies, {_COPIES}"
        )
    trains = isinstance(found, nn.Parameter) and found.requires_grad and torch.is_grad_enabled()
    if trains and not _in_functional_call():
        _refuse(
            state,
            owned,
            "exchanged for another one",
            "put it back and change its values (p.copy_(...)), exchange it for one forward by "
            "torch.func.functional_call",
        )
    return True


def _check_own(state: Wrapped, owned: Owned) -> None:
    if owned.parameter.data_ptr() != owned.address:
        _refuse(state, owned, "given other memory", "change its values in place (p.copy_(...))")
    if owned.parameter.requires_grad and owned.index in state.frozen:
        _refuse(state, owned, "unfrozen", "freeze it again")


def _refuse(state: Wrapped, owned: Owned, what: str, way: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {state.names[owned.index]!r} was {what} after strata.wrap(): {way}, or call "
        "strata.unwrap(model) first"
    )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of torch.func's stands for."""
    while is_transformed(tensor):
        tensor = transformed(tensor)
    return tensor


def _in_functional_call() -> bool:
    """Whether torch.func.functional_call calls us."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _call_code:
        frame = frame.f_back
    return frame is not None
