"""Forwards that people write: with state in Python, random numbers of every kind, in-place changes
and buffers of their own."""

import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from habits import Block, Habit, Habits, Mode, Net, Run, mean_loss
from torch import nn
from torch.nn import functional as F

HABITS = Habits()


@HABITS.add
def counter(run: Run) -> None:
    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    model, optimizer = run.wrap(Net(Counting))
    run.train(model, optimizer)
    run.count([block.calls for block in model.blocks])


@HABITS.add_with(once=True)
def annealed_temperature(run: Run) -> None:
    class Annealed(Block):
        temperature = 2.0

        def forward(self, x: torch.Tensor) -> Any:
            if self.training:
                self.temperature = max(0.5, self.temperature * 0.9)
            return x + torch.tanh(self.inner(x) / self.temperature)

    model, optimizer = run.wrap(Net(Annealed))
    run.train(model, optimizer)
    run.note([block.temperature for block in model.blocks])


@HABITS.add_with(once=True)
def own_generator(run: Run) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.inner(x + 0.3 * torch.randn(x.shape, generator=self.generator))

    model, optimizer = run.wrap(Net(Noisy))
    run.train(model, optimizer)
    run.count(model.blocks[1].generator.get_state())


@HABITS.add_with(once=True)
def iterator_in_forward(run: Run) -> None:
    class Cycled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([0.5, 1.0, 1.5])

        def forward(self, x: torch.Tensor) -> Any:
            return x + next(self.scales) * self.inner(x)

    run.train(*run.wrap(Net(Cycled)))


@HABITS.add_with(once=True)
def layer_drop_by_random(run: Run) -> None:
    class Dropped(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x if self.training and random.random() < 0.4 else x + self.inner(x)

    run.train(*run.wrap(Net(Dropped)))
    run.count(random.random())


@HABITS.add_with(once=True)
def noise_of_numpy(run: Run) -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x + self.inner(x + torch.from_numpy(np.random.normal(0, 0.2, x.shape)).float())

    run.train(*run.wrap(Net(Noisy)))
    run.count(float(np.random.rand()))


@HABITS.add
def layer_drop_by_torch(run: Run) -> None:
    class Dropped(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return x if torch.rand(()).item() < 0.4 else x + self.inner(x)

    run.train(*run.wrap(Net(Dropped)))
    run.note(torch.rand(2))


@HABITS.add
def stochastic_depth(run: Run) -> None:
    class Path(Block):
        def forward(self, x: torch.Tensor) -> Any:
            keep = 0.7
            mask = x.new_empty((x.shape[0], 1)).bernoulli_(keep).div_(keep)
            return x + mask * F.dropout(self.inner(x), 0.1, self.training)

    run.train(*run.wrap(Net(Path)))
    run.note(torch.rand(2))


class Dropout(Block):
    """With a layer of dropout."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.drop(self.inner(x))


@HABITS.add_with(once=True)
def eval_before_backward(run: Run) -> None:
    model, optimizer = run.wrap(Net(Dropout))
    for step in range(3):
        model.train()
        loss = mean_loss(model, step)
        model.eval()
        loss.backward()
        run.note(loss)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add
def dropout_that_the_loop_schedules(run: Run) -> None:
    model, optimizer = run.wrap(Net(Dropout))

    def later(step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3 / (step + 1)

    run.train(model, optimizer, then=later)


@HABITS.add
def logs_in_the_forward(run: Run) -> None:
    class Logs(Block):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[float] = []

        def forward(self, x: torch.Tensor) -> Any:
            self.log.append(x.norm().item())
            return super().forward(x)

    model, optimizer = run.wrap(Net(Logs))
    run.train(model, optimizer)
    run.count([block.log for block in model.blocks])


@HABITS.add_with(once=True)
def memory_of_earlier_batches(run: Run) -> None:
    class Remembers(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bank: deque[torch.Tensor] = deque(maxlen=3)

        def forward(self, x: torch.Tensor) -> Any:
            out = x + self.inner(x)
            if self.bank:
                out = out + 0.1 * torch.stack(list(self.bank)).mean(0)
            self.bank.append(x.detach().mean(0))
            return out

    run.train(*run.wrap(Net(Remembers)))


@HABITS.add_with(once=True)
def state_carried_between_batches(run: Run) -> None:
    """Truncated back-propagation through time, with the state on self."""

    class Carries(Block):
        state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> Any:
            state = torch.zeros_like(x) if self.state is None else self.state.detach()
            self.state = torch.tanh(self.inner(x + state))
            return x + self.state

    run.train(*run.wrap(Net(Carries)))


@HABITS.add
def global_step_that_the_loop_sets(run: Run) -> None:
    class Warm(Block):
        step = 0

        def forward(self, x: torch.Tensor) -> Any:
            return x + min(1.0, self.step / 3) * self.inner(x)

    model, optimizer = run.wrap(Net(Warm))

    def later(step: int) -> None:
        for block in model.blocks:
            block.step = step + 1

    run.train(model, optimizer, then=later)


@HABITS.add
def generator_seeded_in_each_forward(run: Run) -> None:
    class Seeded(Block):
        def forward(self, x: torch.Tensor) -> Any:
            generator = torch.Generator().manual_seed(7)
            mask = torch.rand(x.shape, generator=generator) > 0.3
            return x + self.inner(x * mask)

    run.train(*run.wrap(Net(Seeded)))


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_forwards(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
