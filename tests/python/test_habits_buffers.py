"""Forwards that change buffers, their arguments or other tensors in place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run
from torch import nn
from torch.nn import functional as F

HABITS = Habits()


@HABITS.add
def running_mean_that_the_forward_reads(run: Run) -> None:
    class Centred(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            if self.training:
                self.calls += 1
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x + self.inner(x - self.mean)

    run.train(*run.wrap(Net(Centred)))


@HABITS.add
def buffer_that_is_assigned(run: Run) -> None:
    """DINO's centre: a new tensor in each forward."""

    class Centred(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            out = x + self.inner(x - self.center)
            self.center = self.center * 0.9 + out.detach().mean(0, keepdim=True) * 0.1
            return out

    run.train(*run.wrap(Net(Centred)))


@HABITS.add
def batch_norm(run: Run) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

    run.train(*run.wrap(Net(Normed)))


class Rectified(Block):
    """Saves nothing of its input, which may change."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.gelu(self.up(F.relu(x))))
        return found


@HABITS.add_with(once=True)
def in_place_residual(run: Run) -> None:
    class Inner(Rectified):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(self.inner(x))

    class Sum(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x += block(x)
            return self.head(x)

    run.train(*run.wrap(Sum(Inner)))


@HABITS.add
def in_place_activations(run: Run) -> None:
    def block() -> nn.Module:
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(*layers, nn.ReLU(inplace=True))

    run.train(*run.wrap(Net(block)))


@HABITS.add_with(once=True)
def argument_changed_in_place(run: Run) -> None:
    class Adds(Rectified):
        def forward(self, x: torch.Tensor) -> Any:
            out = self.inner(x)
            return x.add_(out)

    run.train(*run.wrap(Net(Adds)))


@HABITS.add
def queue_of_keys(run: Run) -> None:
    """MoCo: a ring of detached outputs in a buffer, with a pointer."""

    class Queued(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(12, 4))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            logits = out @ self.queue.clone().t()
            start = int(self.pointer)
            self.queue[start : start + len(out)] = out.detach()
            self.pointer[0] = (start + len(out)) % 12
            return torch.cat([out, logits], 1)

    run.train(*run.wrap(Queued()))


@HABITS.add
def codebook_by_moving_averages(run: Run) -> None:
    """A vector quantiser: buffers learn in the forward, gradients go straight through."""

    class Quantises(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(8, WIDTH))
            self.register_buffer("sizes", torch.ones(8))

        def forward(self, x: torch.Tensor) -> Any:
            index = torch.cdist(x.detach(), self.codes).argmin(1)
            hot = F.one_hot(index, 8).float()
            if self.training:
                with torch.no_grad():
                    self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.codes.lerp_(hot.t() @ x / self.sizes[:, None], 0.1)
            code = self.codes[index]
            return x + self.inner(x + (code - x).detach())

    run.train(*run.wrap(Net(Quantises)))


@HABITS.add
def ranges_of_fake_quantisation(run: Run) -> None:
    class Rounds(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.tensor(float("inf")))
            self.register_buffer("high", torch.tensor(-float("inf")))

        def forward(self, x: torch.Tensor) -> Any:
            self.low.copy_(torch.minimum(self.low, x.detach().min()))
            self.high = torch.maximum(self.high, x.detach().max())
            scale = (self.high - self.low) / 255
            return x + self.inner(torch.fake_quantize_per_tensor_affine(x, scale, ZERO, 0, 255))

    run.train(*run.wrap(Net(Rounds)))


ZERO = torch.zeros((), dtype=torch.int32)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_buffers(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
