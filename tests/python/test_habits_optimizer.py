"""What people do with the optimizer that they have: its state, its groups, schedules, closures and
steps that are left out."""

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import ADAMW, WIDTH, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.optim import lr_scheduler as schedulers

HABITS = Habits()


def sgd(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **more})


@HABITS.add
def state_read(run: Run) -> None:
    """Logged, and looked for, by parameter."""
    model, optimizer = run.wrap(Net())
    run.note(len(optimizer.state))

    def look(step: int) -> None:
        run.note(len(optimizer.state), model.head.bias in optimizer.state)
        for p in model.parameters():
            state = optimizer.state[p]
            run.note(sorted(state), state["exp_avg"].norm(), state["exp_avg_sq"].sum())
            run.note(float(state["step"]))
        run.note([s["exp_avg"].abs().max() for s in optimizer.state.values()])
        run.note(optimizer.state.get(model.head.weight, {}).get("exp_avg"))

    run.train(model, optimizer, then=look)


@HABITS.add
def state_zeroed(run: Run) -> None:
    """Momentum is reset for a parameter, when a task changes."""
    model, optimizer = run.wrap(Net())

    def reset(step: int) -> None:
        for p in model.blocks[1].parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in optimizer.state[p]:
                    optimizer.state[p][name].zero_()
        optimizer.state[model.head.weight]["exp_avg"].mul_(0.5)

    run.train(model, optimizer, then=reset)


@HABITS.add
def state_forgotten(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    optimizer.state = defaultdict(dict)
    run.train(model, optimizer, steps=2)
    optimizer.state.clear()
    run.train(model, optimizer, steps=1)
    for p in model.head.parameters():
        optimizer.state.pop(p, None)
    run.train(model, optimizer, steps=1)


@HABITS.add
def state_set(run: Run) -> None:
    """A new row gets the moments of an old one (Gaussian splatting, growing vocabularies)."""
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    state = optimizer.state[model.stem.weight]
    state["exp_avg"][0] = state["exp_avg"][1]
    state["exp_avg_sq"] = torch.ones(WIDTH, WIDTH)
    optimizer.state[model.stem.weight] = state
    run.train(model, optimizer, steps=2)


@HABITS.add
def closures(run: Run) -> None:
    model, optimizer = run.wrap(Net(), None)
    calls = []

    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, step)
            loss.backward()
            calls.append(step)
            return loss

        run.note(optimizer.step(closure))
    optimizer.zero_grad()
    run.note(calls)


@HABITS.add
def hooks_around_steps(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(f"{o.param_groups[0]['lr']}"))
    run.train(model, optimizer)
    run.note(seen)


@HABITS.add
def both_states_saved_and_loaded_in_the_middle(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    schedule = schedulers.ExponentialLR(optimizer, 0.8)
    run.train(model, optimizer, steps=2, then=lambda step: schedule.step())
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    run.train(model, optimizer, steps=2, then=lambda step: schedule.step())
    file.seek(0)
    for name, state in torch.load(file).items():
        parts[name].load_state_dict(state)
    run.train(model, optimizer, steps=2, then=lambda step: schedule.step())


@HABITS.add
def state_of_a_plain_optimizer_taken_over(run: Run) -> None:
    first = Net()
    before = torch.optim.AdamW(first.parameters(), **ADAMW)
    mean_loss(first, 0).backward()
    before.step()
    before.zero_grad()
    model, optimizer = run.wrap(Net())
    model.load_state_dict(first.state_dict())
    optimizer.load_state_dict(before.state_dict())
    run.train(model, optimizer)


@HABITS.add_with(early="none")
def second_optimizer(run: Run) -> None:
    """The head has one of its own, as with Muon beside AdamW."""
    plain = Net()
    trunk = [p for n, p in plain.named_parameters() if not n.startswith("head")]
    model, optimizer = run.wrap(plain, torch.optim.AdamW(trunk, **ADAMW))
    other = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = mean_loss(model, step)
        loss.backward()
        run.note(loss)
        run.note_gradients(model)
        for o in (optimizer, other):
            o.step()
            o.zero_grad()


@HABITS.add
def other_rules(run: Run) -> None:
    for make in (
        lambda m: sgd(m, nesterov=True, weight_decay=1e-3),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-3),
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3, foreach=True),
    ):
        plain = Net()
        run.train(*run.wrap(plain, make(plain)), steps=2)


@HABITS.add
def maximised(run: Run) -> None:
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, maximize=True)
    run.train(*run.wrap(plain, optimizer), lambda m, step: -mean_loss(m, step))


@HABITS.add
def optimizer_looked_at(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.note(isinstance(optimizer, torch.optim.Optimizer), optimizer.defaults["lr"])
    run.note(sum(p.numel() for g in optimizer.param_groups for p in g["params"]))
    params = optimizer.param_groups[0]["params"]
    run.note([p is q for p, q in zip(model.parameters(), params, strict=True)])
    run.train(model, optimizer, steps=2)
    run.note(sorted(optimizer.state_dict()), sorted(optimizer.state_dict()["state"]))
    run.note("weight_decay: 0.1" in repr(optimizer))


@HABITS.add
def zero_grad_before_the_forward(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_loss(model, step)
        loss.backward()
        optimizer.step()
        run.note(loss.item())
    model.zero_grad()


@HABITS.add
def zero_grad_at_odd_times(run: Run) -> None:
    """Between the forward and the backward, and twice."""
    model, optimizer = run.wrap(Net())
    for step in range(3):
        loss = mean_loss(model, step)
        optimizer.zero_grad()
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        run.note(loss.item())


@HABITS.add_with(early="refused")
def zero_grad_to_zeros(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = mean_loss(model, step)
        loss.backward()
        optimizer.step()
        run.note(loss.item())
        optimizer.zero_grad(set_to_none=False)
        run.note_gradients(model)


@HABITS.add
def two_models_alternate(run: Run) -> None:
    """A GAN."""
    maker, its = run.wrap(Net())
    critic, other = run.wrap(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))
    for step in range(3):
        fake = maker(batch(step))
        loss = (critic(fake.detach()) - critic(torch.ones(6, 4))).mean().tanh()
        loss.backward()
        other.step()
        other.zero_grad()
        critic.requires_grad_(False)
        loss = -critic(maker(batch(step))).mean()
        loss.backward()
        its.step()
        its.zero_grad()
        critic.requires_grad_(True)
        run.note(loss)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_optimizers(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
