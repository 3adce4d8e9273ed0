"""Units whose memory is kept by saved-tensor hooks that their own forward puts in place.

    before = references(params)           # the module's forward begins
    ...
    if references(params) > before:       # it has ended; escapes.py knows of views
        hold(output, pins, units)

Note [Hooks within a unit]. Such hooks lie above ours, so autograd asks nobody but them, and torch
tells nobody that they are there. They are given parameters, and views of them. What they keep of
those as they are, not as copies, autograd later reads as raw memory: right for as long as the unit
is entered. So a forward behind which somebody new refers to a parameter, or to its memory, has its
unit entered from when backward comes to what the module returned until its gradients have landed.
A reference that is there for another reason costs no more than that. Limits: hooks that keep a
name, and look the parameter up in a table of their own; parts of the forward that backward reaches
otherwise than through what the module returned.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._activations.arguments import tensors_in
from .._torch_compat import use_count

if TYPE_CHECKING:
    from .._runtime.wrapped import Unit
    from .pins import Pins


def _counts_for_python() -> bool:
    """Whether C++ that refers to a tensor counts, once, as a reference to the Python object."""
    tensor = torch.empty(1)
    before = sys.getrefcount(tensor)
    view = tensor[:]
    return sys.getrefcount(tensor) > before and view._base is not None


COUNTS_FOR_PYTHON = _counts_for_python()


def references(params: Sequence[nn.Parameter]) -> int:
    """A number that grows with how often Python objects refer to the parameters. REQUIRES: they are
    plain ones."""
    count = sum(map(sys.getrefcount, params))
    if COUNTS_FOR_PYTHON:
        count -= sum(map((1).__lt__, map(use_count, params)))
    return count


class Hold:
    """Enters units for nodes that read their memory without asking."""

    __slots__ = ("_pins", "_units")

    def __init__(self, pins: Pins, units: Sequence[Unit]) -> None:
        self._pins = pins
        self._units = units

    def __call__(self, grads: Any) -> None:
        """Called by autograd ahead of the node that made what a module returned."""
        for unit in self._units:
            self._pins.hold(unit)


def hold(output: Any, pins: Pins, units: Sequence[Unit]) -> None:
    """See Note [Hooks within a unit]. `output`: of the module."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(Hold(pins, units))
