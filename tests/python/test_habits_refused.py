"""What is documented as refused: by an error of strata's that says what to do."""

from pathlib import Path

import pytest
import torch
from habits import WIDTH, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn

HABITS = Habits()


@HABITS.add_with(refused=r"groups cannot be added.*(before|unwrap)")
def group_added(run: Run) -> None:
    _, optimizer = run.wrap(Net())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-4})


@HABITS.add_with(refused=r"(?s)Adafactor.*element|element.*Adafactor|Adafactor.*itself")
def optimizer_of_whole_tensors(run: Run) -> None:
    plain = Net()
    run.wrap(plain, torch.optim.Adafactor(plain.parameters()))


@HABITS.add_with(refused="(?s)unfrozen|frozen.*wrap|wrap.*trained")
def unfrozen_later(run: Run) -> None:
    """There is no room for its gradient."""
    plain = Net()
    plain.stem.requires_grad_(False)
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, steps=2)
    model.stem.requires_grad_(True)
    run.train(model, optimizer, steps=2)


@HABITS.add_with(refused="(?s)replaced|exchanged|unwrap")
def parameter_replaced(run: Run) -> None:
    """A classifier with more classes, in the middle."""
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    model.head.weight = nn.Parameter(torch.zeros(4, WIDTH))
    run.train(model, optimizer, steps=2)


@HABITS.add_with(refused="strata")
def dtype_changed_after_wrapping(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    model.to(torch.bfloat16)
    run.train(model, optimizer, lambda m, i: m(batch(i).bfloat16()).float().square().mean())


@HABITS.add_with(refused="zero_grad")
def step_after_a_step_without_zero_grad(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(2):
        mean_loss(model, step).backward()
        optimizer.step()


@HABITS.add_with(refused="exchange.*assign=")
def state_dict_that_is_assigned(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    run.train(model, optimizer)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_refused(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
