"""Loops around a step: evaluation between steps, batches of every shape, exceptions in the middle,
several forwards and backwards, compilation, saving."""

import io
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

HABITS = Habits()


@HABITS.add
def evaluation_between_steps(run: Run) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

    model, optimizer = run.wrap(Net(Normed))

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.note(model(batch(40 + step, 9)))
        with torch.inference_mode():
            run.note(model(batch(50 + step, 3)).argmax(1))
        model.train()

    evaluate(0)
    run.train(model, optimizer, then=evaluate)


@HABITS.add
def validation_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        loss = mean_loss(model, step)
        loss.backward()
        if step == 1 and (run.mode is None or run.mode.update == "on_step"):
            with torch.no_grad():
                model(batch(60))
        optimizer.step()
        run.note(loss)
        optimizer.zero_grad()


@HABITS.add
def batches_of_every_size(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    sizes = [6, 4, 6, 1, 7, 4]
    run.train(model, optimizer, lambda m, i: m(batch(i, sizes[i])).square().mean(), steps=6)


@HABITS.add
def sequences_of_every_length(run: Run) -> None:
    """A curriculum: longer from step to step."""
    layer = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 48, 0.1, batch_first=True)  # noqa: E731
    model, optimizer = run.wrap(Net(layer, 2))

    def loss_of(m: Any, step: int) -> torch.Tensor:
        x = batch(step, 2 * (3 + step)).view(2, 3 + step, WIDTH)
        loss: torch.Tensor = m(x).square().mean()
        return loss

    run.train(model, optimizer, loss_of)


@HABITS.add
def empty_batch(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    sizes = [6, 0, 5, 0]
    run.train(model, optimizer, lambda m, i: m(batch(i, sizes[i])).square().sum())


@HABITS.add
def out_of_memory_in_a_forward(run: Run) -> None:
    """Caught, the batch is left out, and training goes on."""

    class Fails(Block):
        fails = False

        def forward(self, x: torch.Tensor) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().forward(x)

    model, optimizer = run.wrap(Net(Fails))
    for step in range(5):
        model.blocks[1].fails = step in (0, 3)
        try:
            loss = mean_loss(model, step)
            loss.backward()
            optimizer.step()
            run.note(loss)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            run.note("left out")
        optimizer.zero_grad()


@HABITS.add
def keyboard_interrupt_in_a_forward(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def stop(m: Any, args: Any) -> None:
        raise KeyboardInterrupt

    for step in range(4):
        handle = model.blocks[2].register_forward_pre_hook(stop) if step == 2 else None
        try:
            loss = mean_loss(model, step)
            loss.backward()
            optimizer.step()
            run.note(loss)
        except KeyboardInterrupt:
            run.note("stopped")
        optimizer.zero_grad()
        if handle is not None:
            handle.remove()


@HABITS.add
def loop_as_a_generator(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def steps() -> Iterator[float]:
        for step in range(4):
            loss = mean_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    run.note(list(steps()))


@HABITS.add
def data_loader_with_shuffling(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    data = TensorDataset(batch(0, 14), torch.arange(14) % 4)
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss)
    x, y = pickle.loads(pickle.dumps(data[:4]))
    run.note(model(x).argmax(1) == y, random.random())


@HABITS.add
def autocast(run: Run) -> None:
    def loss_of(m: Any, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(batch(step))
        assert out.dtype == torch.bfloat16
        return (out.float() - 1).square().mean()

    run.train(*run.wrap(Net()), loss_of, steps=3)


@HABITS.add
def compiled(run: Run) -> None:
    model, optimizer = run.wrap(Net(count=1))
    graphs = torch.compile(model, backend="eager")
    run.train(graphs, optimizer, steps=3)
    torch._dynamo.reset()


@HABITS.add
def extra_state_of_modules(run: Run) -> None:
    class Counts(Block):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model, optimizer = run.wrap(Net(Counts))

    def count(step: int) -> None:
        model.blocks[0].seen += 1

    run.train(model, optimizer, then=count, steps=2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    run.train(model, optimizer, then=count, steps=1)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    run.note(model.blocks[0].seen)


@HABITS.add
def parts_frozen_before_wrapping(run: Run) -> None:
    plain = Net()
    plain.stem.requires_grad_(False)
    plain.blocks[1].requires_grad_(False)
    plain.blocks[1].eval()
    trained = [p for p in plain.parameters() if p.requires_grad]
    run.train(*run.wrap(plain, torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)))


@HABITS.add
def parts_thawed_one_by_one(run: Run) -> None:
    """Gradual unfreezing of what was trained when the model was wrapped."""
    model, optimizer = run.wrap(Net())
    for part in (model.stem, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)

    def thaw(step: int) -> None:
        [model.blocks[1], model.blocks[0], model.stem, model.head][step].requires_grad_(True)

    run.train(model, optimizer, then=thaw)


@HABITS.add
def parameters_without_use(run: Run) -> None:
    class Spare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(WIDTH, WIDTH)
            self.odd = nn.Linear(WIDTH, 4)
            self.step = 0

        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return out + self.odd(x) if self.step % 2 else out

    model, optimizer = run.wrap(Spare())

    def later(step: int) -> None:
        model.step = step + 1

    run.train(model, optimizer, then=later)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_loops(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
