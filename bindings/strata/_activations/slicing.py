"""Cuts the arguments of a forward into slices of the batch, puts the outputs together, and sums the
gradients of the slices in float32.

    sums, outputs = SliceSums(parameters), []
    for piece in cut(arguments.tensors, batch_size(arguments.tensors), 4):
        args, kwargs = arguments.filled(piece)
        outputs.append(Arguments(module.forward(*args, **kwargs)))
        sums.watch(outputs[-1].tensors, piece)
    result = merged(outputs, verdict.cut)
    sums.begin_at(Arguments(result).tensors)

The batch is the first dimension of the first tensor. Every other tensor with as many rows is cut as
well, and all others are given to each slice. Whether that is right is tried: see trial.py.

Note [Sums of slices]. Autograd adds what several slices give a parameter in the parameter's dtype,
and rounds after every slice: with 32 slices in bfloat16 the error is several times that of the
whole batch. So nodes that hand a gradient to a parameter's accumulator are looked up in the graph
of each slice. In a backward a hook behind each of them takes its gradient into a float32 sum and
hands on nothing, but for the last one that runs, which hands on the sum, rounded. Autograd tells
how many will run when the backward comes to the merged outputs. Neither the forward nor hooks of
parameters notice any of this. Parameters of 32 bits need no sum. Where a backward is itself
recorded (create_graph), autograd adds.

Nodes are referred to by hooks of nodes above them alone, as they are by the graph: a graph that is
dropped is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from .._torch_compat import DisableTorchFunction, graph_task, will_run
from .arguments import Arguments


@dataclass(frozen=True)
class Verdict:
    """Why a forward may not be cut, or "" and which tensors of its output are cut with the batch.
    The others are the same for every slice."""

    reason: str
    cut: tuple[bool, ...] = ()


def batch_size(tensors: Sequence[torch.Tensor]) -> int:
    """Rows in the batch; 0 where there is none."""
    return tensors[0].size(0) if tensors and tensors[0].dim() else 0


def is_cut(tensor: torch.Tensor, batch: int) -> bool:
    """Whether a tensor is taken to have one row for each row of the batch."""
    return tensor.dim() > 0 and tensor.size(0) == batch


def cut(tensors: Sequence[torch.Tensor], batch: int, count: int) -> Iterator[list[torch.Tensor]]:
    """The arguments of each slice: views of the tensors. The first slices may be a row longer."""
    parts = [t.tensor_split(count) if is_cut(t, batch) else [t] * count for t in tensors]
    return (list(piece) for piece in zip(*parts, strict=True))


def fits(outputs: Sequence[Arguments], cut_ones: Sequence[bool], batch: int) -> bool:
    """Whether outputs have the form that `cut_ones` tells: they may be merged then."""
    if any(o.others or len(o.tensors) != len(cut_ones) for o in outputs):
        return False
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return all(
        not cut_here or (all(t.dim() for t in column) and sum(t.size(0) for t in column) == batch)
        for cut_here, column in zip(cut_ones, columns, strict=True)
    )


def merged(outputs: Sequence[Arguments], cut_ones: Sequence[bool]) -> Any:
    """The output of the whole batch. `cut_ones`: which of its tensors are cut with the batch.
    All its tensors are new ones, with nodes of autograd of their own."""
    columns = zip(*(output.tensors for output in outputs), strict=True)
    return outputs[0].filled(
        [
            torch.cat(column) if cut_here else column[0].view_as(column[0])
            for cut_here, column in zip(cut_ones, columns, strict=True)
        ]
    )


Grads = tuple[torch.Tensor | None, ...]

BACKWARDS_MAX = 4  # at a time, one within another; older ones have raised


class SliceSums:
    """The sums of one forward. Use from the thread that trains, behind one another."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """REQUIRES: gradients are enabled."""
        with DisableTorchFunction():
            narrow = [p for p in parameters if p.requires_grad and p.itemsize < 4]
            # Python has one object for a node for as long as that is held.
            dtypes = {get_gradient_edge(p).node: p.dtype for p in narrow}
        self._sums = {node: _Sum(node, dtype) for node, dtype in dtypes.items()}
        self._nodes: dict[Any, list[Any]] = {node: [] for node in dtypes}

    def watch(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Finds the nodes between them that hand gradients to the parameters."""
        if not self._sums:
            return
        seen = {t.grad_fn for t in inputs if t.grad_fn is not None}
        ahead = [t.grad_fn for t in outputs if t.grad_fn is not None]
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            for place, (below, _) in enumerate(node.next_functions):
                if below in self._sums:
                    node.register_hook(_Take(self._sums[below], place))
                    self._nodes[below].append(node)
                elif below is not None:
                    ahead.append(below)

    def begin_at(self, merged: Iterable[torch.Tensor]) -> None:
        """REQUIRES: the tensors have nodes of their own, above all that were found."""
        pairs = [(self._sums[key], nodes) for key, nodes in self._nodes.items() if nodes]

        def begin(_: Grads) -> None:
            """Called by autograd ahead of a node of `merged`."""
            for total, nodes in pairs:
                total.begin(nodes)

        for tensor in merged:
            if pairs and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)
        self._nodes.clear()


class _Sum:
    """The gradients of one parameter, in as many backwards as there are."""

    __slots__ = ("_accumulator", "_dtype", "_early", "_left", "_totals")

    def __init__(self, accumulator: Any, dtype: torch.dtype) -> None:
        self._accumulator = accumulator
        self._dtype = dtype
        # By backward: nodes that have not run, and that ran ahead of begin(); the gradients so far.
        self._left: dict[int, int] = {}
        self._early: dict[int, int] = {}
        self._totals: dict[int, torch.Tensor] = {}

    def begin(self, nodes: Sequence[Any]) -> None:
        """A backward comes to the slices."""
        task = graph_task()
        if task in self._left:
            return
        for of_tasks in (self._left, self._early, self._totals):
            for old in sorted(of_tasks)[: -BACKWARDS_MAX + 1]:
                del of_tasks[old]
        self._left[task] = sum(map(will_run, nodes)) - self._early.pop(task, 0)

    def take(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """What goes on in the place of the gradient of one node."""
        task = graph_task()
        if not self._left.get(task):  # reached on another way than through the merged outputs
            self._early[task] = self._early.get(task, 0) + 1
            return grad
        self._left[task] -= 1
        total = self._totals.pop(task, None)
        if total is None and not self._left[task]:
            return grad
        if grad is not None:
            grad = grad if grad.layout == torch.strided else grad.to_dense()
            total = grad.float() if total is None else total.add_(grad)
        if self._left[task]:
            if total is not None:
                self._totals[task] = total
            return None
        assert total is not None
        rounded = total.to(self._dtype)
        if grad is None:  # a hook may put no gradient where there is none
            self._accumulator(rounded)
            return None
        return rounded


@dataclass(slots=True, eq=False)
class _Take:
    """Called by autograd behind a node whose gradient number `place` is a parameter's."""

    _sum: _Sum
    _place: int

    def __call__(self, grads: Grads, _: Grads) -> Grads | None:
        """What the node hands on; None: what it has."""
        place, mine = self._place, grads[self._place]
        if torch.is_grad_enabled():
            return None
        kept = self._sum.take(mine)
        return None if kept is mine else (*grads[:place], kept, *grads[place + 1 :])
