"""Sums the gradients of a unit's slices in float32, and rounds them once.

    away = set()
    sums = SliceSums(module, away)
    shares = sums.shares()              # of one forward of the module that runs on slices
    with sums.in_place(shares):         # for each slice
        module.forward(piece)
    put_back(away)                      # where an exception may have come between

Note [Sums of slices]. Autograd adds what several slices give a parameter in the parameter's dtype,
and rounds after every slice: with 16 slices in bfloat16 the error is several times that of the
whole batch. So each slice reads a stand-in: a view of the parameter whose gradient is added to a
float32 sum. All of them come from one view of the parameter, whose own backward runs behind the
last of them, whether they have got a gradient or not; it hands the sum over, rounded. Parameters of
32 bits need none of it. Where a backward is itself recorded (create_graph), autograd adds.

While a slice runs, stand-ins lie where the module looks its parameters up. Where an exception of a
signal handler leaves some behind, `away` knows of it. Another thread that evaluates may take them
away meanwhile: what reads the parameter then is added by autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# For each parameter that is summed: the view that all slices share, and the sum.
Shares = list[tuple[torch.Tensor, "_Total"]]


class SliceSums:
    """The parameters of one module, and of all below it, whose slices are summed. Use from one
    thread at a time, while they are plain ones."""

    def __init__(self, module: nn.Module, away: set[SliceSums]) -> None:
        """`away`: those of a model whose stand-ins may lie where parameters belong."""
        self._away = away
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (inner._parameters, name, parameter)
            for inner in module.modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None and parameter.requires_grad and parameter.itemsize < 4
        ]

    def shares(self) -> Shares:
        """One for each place; a parameter with several places has one share."""
        by_id: dict[int, tuple[torch.Tensor, _Total]] = {}
        for _, _, parameter in self._places:
            if id(parameter) not in by_id:
                total = _Total()
                by_id[id(parameter)] = (_Sum.apply(parameter, total), total)
        return [by_id[id(parameter)] for _, _, parameter in self._places]

    @contextlib.contextmanager
    def in_place(self, shares: Shares) -> Iterator[None]:
        """The module reads stand-ins: those of another slice each time."""
        stand_ins = {id(total): _Share.apply(shared, total) for shared, total in shares}
        self._away.add(self)
        try:
            for (parameters, name, _), (_, total) in zip(self._places, shares, strict=True):
                parameters[name] = stand_ins[id(total)]
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """The module reads its parameters."""
        for parameters, name, parameter in self._places:
            if type(parameters.get(name)) is torch.Tensor:  # else it is there, or was exchanged
                parameters[name] = parameter
        self._away.discard(self)


def put_back(away: set[SliceSums]) -> None:
    """All modules read their parameters. Call it where an exception may have come."""
    for sums in list(away):
        sums.put_back()


class _Total:
    """The gradients of one parameter so far."""

    __slots__ = ("sum",)

    def __init__(self) -> None:
        self.sum: torch.Tensor | None = None


class _Sum(torch.autograd.Function):
    """A view of a parameter; its gradient is the sum of those of all slices."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, total: _Total) -> torch.Tensor:
        ctx.total, ctx.dtype = total, parameter.dtype
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *added: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Called by autograd behind all slices. `added`: what it has added itself."""
        total, ctx.total.sum = ctx.total.sum, None
        if total is None:
            return added[0], None
        if added[0] is not None:
            total += added[0]
        return total.to(ctx.dtype), None


class _Share(torch.autograd.Function):
    """The view of one slice; its gradient goes to the sum."""

    @staticmethod
    def forward(ctx: Any, shared: torch.Tensor, total: _Total) -> torch.Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Called by autograd when the slice has all of its gradient."""
        (grad,) = grads
        if grad is None or torch.is_grad_enabled() or grad.layout != torch.strided:
            return grad, None
        if ctx.total.sum is None:
            ctx.total.sum = grad.float()
        else:
            ctx.total.sum += grad
        return None, None
