"""A model as an object: parts exchanged, forwards patched, models in others, exports."""

import copy
import gc
import io
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from habits import WIDTH, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn

HABITS = Habits()


@HABITS.add
def head_exchanged_for_features(run: Run) -> None:
    """model.head = nn.Identity(), and back."""
    model, optimizer = run.wrap(Net())

    def features(step: int) -> None:
        head = model.head
        model.head = nn.Identity()
        with torch.no_grad():
            run.note(model(batch(step + 9)))
        model.head = head

    run.train(model, optimizer, then=features)


@HABITS.add
def forwards_patched(run: Run) -> None:
    """A block's forward is replaced by a function, before wrapping and after."""

    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * self.inner(x)

    plain = Net()
    plain.blocks[0].forward = types.MethodType(doubled, plain.blocks[0])
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, steps=2)
    model.blocks[1].forward = types.MethodType(doubled, model.blocks[1])
    run.train(model, optimizer, steps=2)
    old = model.blocks[2].forward
    model.blocks[2].forward = lambda x: 0.5 * old(x)
    run.train(model, optimizer, steps=2)


@HABITS.add
def forward_called_by_name(run: Run) -> None:
    """block.forward(x), past all hooks."""

    class Direct(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem.forward(x)
            for block in self.blocks:
                x = block.forward(x)
            return self.head.forward(x)

    model, optimizer = run.wrap(Direct())
    run.train(model, optimizer, lambda m, i: (m.forward(batch(i)) - 1).square().mean())


@HABITS.add
def wrapped_model_within_another(run: Run) -> None:
    class Normalised(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module
            self.register_buffer("std", torch.full((WIDTH,), 2.0))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x / self.std)

    model, optimizer = run.wrap(Net())
    outer = Normalised(model)
    run.train(outer, optimizer)
    run.note(sorted(outer.state_dict()), outer.head.bias, len(outer.blocks))


@HABITS.add
def tensors_looked_for_in_all_of_memory(run: Run) -> None:
    """The memory reporter of many forums: every tensor that the garbage collector knows."""
    model, optimizer = run.wrap(Net())

    def report(step: int) -> None:
        sizes = []
        for thing in gc.get_objects():
            try:
                if torch.is_tensor(thing) or (
                    hasattr(thing, "data") and torch.is_tensor(thing.data)
                ):
                    sizes.append((type(thing).__name__, thing.size(), thing.numel()))
            except Exception:
                continue
        run.note(len(sizes) > 20)

    run.train(model, optimizer, then=report, steps=2)


@HABITS.add
def summary_of_the_model(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    rows = []
    for name, module in model.named_modules():
        own = sum(
            p.nelement() * p.element_size() for p in module._parameters.values() if p is not None
        )
        rows.append((name, type(module).__name__, own, sum(1 for _ in module.children())))
    run.note(rows, [n for n, _ in model.named_parameters(recurse=True)], str(model))
    run.note([p.untyped_storage().nbytes() for p in model.parameters()])
    run.train(model, optimizer, steps=2)


@HABITS.add
def weights_exported(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def export(step: int) -> None:
        state = model.state_dict()
        run.note({name: value.double() for name, value in state.items()})
        file = io.BytesIO()
        np.savez(file, **{name: value.cpu().numpy() for name, value in state.items()})
        file.seek(0)
        run.note({name: torch.from_numpy(value) for name, value in np.load(file).items()})

    run.train(model, optimizer, then=export, steps=2)


@HABITS.add
def whole_model_pickled(run: Run) -> None:
    """torch.save(model)."""
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    run.note(other(batch(0)))
    run.train(model, optimizer, steps=1)


@HABITS.add
def traced_for_deployment(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    model.eval()
    with torch.no_grad():
        traced = torch.jit.trace(copy.deepcopy(model), batch(0))
        run.note(traced(batch(1)))
    model.train()
    run.train(model, optimizer, steps=1)


@HABITS.add
def quantised_copy(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    twin = copy.deepcopy(model).eval()
    twin.head = nn.Linear(WIDTH, 2)
    twin.half().float()
    run.note(twin.blocks[0].up.weight, twin(batch(0)).shape)
    run.train(model, optimizer, steps=1)


@HABITS.add
def phases_by_set_grad_enabled(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(6):
        training = step % 3 != 2
        model.train(training)
        with torch.set_grad_enabled(training):
            loss = mean_loss(model, step)
            if training:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        run.note(loss)


@HABITS.add
def saliency_by_functional(run: Run) -> None:
    """torch.autograd.functional over the model as a function."""
    model, optimizer = run.wrap(Net(count=1))

    def look(step: int) -> None:
        x = batch(step, 2)
        run.note(torch.autograd.functional.jacobian(model, x))
        run.note(torch.autograd.functional.hvp(lambda y: model(y).square().sum(), x, x)[1])

    run.train(model, optimizer, then=look, steps=2)


@HABITS.add
def buffers_registered_later(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    model.register_buffer("seen", torch.zeros(()))
    model.blocks[0].note = nn.Identity()
    run.train(model, optimizer, then=lambda step: model.seen.add_(1), steps=2)


@HABITS.add
def evaluated_in_another_thread(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def evaluate(seed: int) -> torch.Tensor:
        with torch.no_grad():
            return model(batch(seed))

    with ThreadPoolExecutor(1) as pool:

        def look(step: int) -> None:
            run.note(pool.submit(evaluate, step).result())

        run.train(model, optimizer, then=look)


@HABITS.add
def data_parallel_on_one_device(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    outer = nn.DataParallel(model)
    run.train(outer, optimizer)
    run.note(outer.module is model, sorted(outer.state_dict())[:2])


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_objects(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
