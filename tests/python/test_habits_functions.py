"""Where autograd is used inside of a forward: checkpoints, functions and branches of one's own."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import Block, Habit, Habits, Mode, Net, Run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

HABITS = Habits()


def checkpointed(reentrant: bool) -> type[nn.Module]:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    return Checkpointed


class Dropped(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + F.dropout(self.inner(x), 0.2, self.training)


@HABITS.add
def checkpoints_of_blocks(run: Run) -> None:
    run.train(*run.wrap(checkpointed(False)(Dropped)))


@HABITS.add
def reentrant_checkpoints(run: Run) -> None:
    run.train(*run.wrap(checkpointed(True)(Dropped)))


@HABITS.add
def checkpoint_within_a_block(run: Run) -> None:
    class Part(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    run.train(*run.wrap(Net(Part)))


@HABITS.add
def checkpoint_sequential_of_torch(run: Run) -> None:
    class Segments(Net):
        def forward(self, x: torch.Tensor) -> Any:
            layers = nn.Sequential(*self.blocks)
            return self.head(checkpoint_sequential(layers, 2, self.stem(x), use_reentrant=False))

    run.train(*run.wrap(Segments()))


class Straight(torch.autograd.Function):
    """Rounds, and hands the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 2), None


@HABITS.add
def function_of_ones_own(run: Run) -> None:
    class Rounds(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + Straight.apply(self.inner(x), 16.0)

    run.train(*run.wrap(Net(Rounds)))


class Scaled(torch.autograd.Function):
    """A product with a parameter, which it saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@HABITS.add
def function_that_saves_a_parameter(run: Run) -> None:
    class Own(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + self.down(F.gelu(Scaled.apply(x, self.up.weight)))

    run.train(*run.wrap(Net(Own)))


@HABITS.add
def autocast_within_the_forward(run: Run) -> None:
    class Casts(Block):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                return x + self.inner(x.float())

    run.train(*run.wrap(Net(Casts)))


@HABITS.add
def targets_without_gradients_within_the_forward(run: Run) -> None:
    """BYOL, SimSiam: a branch under no_grad(), by the same blocks."""

    class Both(Net):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                target = super().forward(x.flip(0))
            with contextlib.nullcontext():
                return super().forward(x) - target.detach()

    run.train(*run.wrap(Both()))


@HABITS.add
def frozen_trunk_under_no_grad(run: Run) -> None:
    class Probe(Net):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                x = self.stem(x)
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    run.train(*run.wrap(Probe()))


@HABITS.add
def normalised_weights(run: Run) -> None:
    """Weight standardisation, cosine heads."""

    class Cosine(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(5.0))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.scale * F.linear(F.normalize(x), F.normalize(self.head.weight))

    run.train(*run.wrap(Cosine()))


@HABITS.add
def tied_through_a_function(run: Run) -> None:
    class Tied(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return F.linear(x, self.stem.weight)

    run.train(*run.wrap(Tied()))


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_functions(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
