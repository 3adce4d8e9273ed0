"""Averages, copies and mixtures of a model's weights."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

HABITS = Habits()


def values(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@HABITS.add
def shadow_weights_by_data(run: Run) -> None:
    """The EMA class of many tutorials: shadow, apply_shadow, restore."""
    model, optimizer = run.wrap(Net())
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def evaluate(step: int) -> None:
        for name, p in model.named_parameters():
            shadow[name] = 0.7 * shadow[name] + 0.3 * p.data
        backup = {}
        for name, p in model.named_parameters():
            backup[name] = p.data
            p.data = shadow[name]
        with torch.no_grad():
            run.note(model(batch(9)))
        for name, p in model.named_parameters():
            p.data = backup[name]

    run.train(model, optimizer, then=evaluate)
    run.note(shadow)


@HABITS.add
def target_network(run: Run) -> None:
    """Q-learning, BYOL: a copy from before, which follows slowly."""
    plain = Net()
    target = copy.deepcopy(plain).requires_grad_(False)
    model, optimizer = run.wrap(plain)

    def loss_of(m: Any, step: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = target(batch(step + 50)).tanh()
        return F.smooth_l1_loss(m(batch(step)), wanted)

    def follow(step: int) -> None:
        for t, p in zip(target.parameters(), model.parameters(), strict=True):
            t.data.mul_(0.9).add_(p.data, alpha=0.1)

    run.train(model, optimizer, loss_of, then=follow)
    run.note(values(target))


@HABITS.add
def target_by_load_state_dict(run: Run) -> None:
    target = Net()
    model, optimizer = run.wrap(Net())

    def follow(step: int) -> None:
        if step % 2:
            run.note(str(target.load_state_dict(model.state_dict())))

    run.train(model, optimizer, then=follow)
    run.note(values(target))


@HABITS.add
def best_weights_are_kept_and_loaded(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    best: dict[str, Any] = {}

    def keep(step: int) -> None:
        if step == 1:
            best.update(copy.deepcopy(model.state_dict()))

    run.train(model, optimizer, then=keep)
    run.note(str(model.load_state_dict(best)))
    run.train(model, optimizer, steps=2)
    run.note(best)


@HABITS.add
def state_dict_that_is_kept_follows(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    kept = model.state_dict()
    cloned = {name: value.clone() for name, value in kept.items()}
    run.train(model, optimizer)
    run.note(dict(kept))
    model.load_state_dict(cloned)
    run.note(dict(kept))
    run.train(model, optimizer, steps=1)


@HABITS.add
def saved_by_torch_and_loaded_into_another(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "epoch": 3, "best": 0.5}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = Net()
    other.load_state_dict(saved["model"])
    run.note(saved, other(batch(3)))
    run.train(model, optimizer, steps=1)


@HABITS.add
def averaged_model_of_torch(run: Run) -> None:
    plain = Net()
    average = AveragedModel(plain)
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, then=lambda step: average.update_parameters(model))
    run.note(values(average), average(batch(1)))


@HABITS.add
def averaged_model_by_lists(run: Run) -> None:
    """With torch's EMA: torch._foreach_lerp_ over all parameters."""
    plain = Net()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, then=lambda step: average.update_parameters(model))
    run.note(values(average))


@HABITS.add
def weights_averaged_at_the_end(run: Run) -> None:
    """Stochastic weight averaging by hand: the mean is loaded, statistics are made anew."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

    model, optimizer = run.wrap(Net(Normed))
    seen: list[dict[str, torch.Tensor]] = []

    def keep(step: int) -> None:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})

    run.train(model, optimizer, then=keep)
    floats = [name for name in seen[0] if seen[0][name].is_floating_point()]
    mean = {name: torch.stack([s[name] for s in seen]).mean(0) for name in floats}
    model.load_state_dict(mean, strict=False)
    update_bn([batch(i) for i in range(3)], model)
    model.eval()
    run.note(model(batch(0)))


@HABITS.add
def slow_weights(run: Run) -> None:
    """Lookahead: every second step goes half the way."""
    model, optimizer = run.wrap(Net())
    slow = [p.clone().detach() for p in model.parameters()]

    def sync(step: int) -> None:
        if step % 2:
            for p, q in zip(model.parameters(), slow, strict=True):
                q.add_(p.data - q, alpha=0.5)
                p.data.copy_(q)

    run.train(model, optimizer, then=sync)


@HABITS.add
def mixture_of_two_state_dicts(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    first = {name: value.clone() for name, value in model.state_dict().items()}
    run.train(model, optimizer)
    last = model.state_dict()
    model.load_state_dict({name: first[name].lerp(last[name], 0.3) for name in last})
    run.note(model(batch(2)))


@HABITS.add
def copy_of_the_wrapped_model(run: Run) -> None:
    """copy.deepcopy(model) as a teacher, a snapshot, a best model."""
    model, optimizer = run.wrap(Net())
    run.train(model, optimizer, steps=2)
    twin = copy.deepcopy(model)
    run.train(model, optimizer, steps=1)
    with torch.no_grad():
        run.note(twin(batch(1)), values(twin))


@HABITS.add
def two_wrapped_models_exchange_weights(run: Run) -> None:
    first, optimizer = run.wrap(Net())
    second, other = run.wrap(Net())
    run.train(first, optimizer, steps=2)
    second.load_state_dict(first.state_dict())
    run.train(second, other, steps=1)
    with torch.no_grad():
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            p.lerp_(q, 0.5)
            q.copy_(p)
    run.note(first(batch(0)), second(batch(0)))
    run.train(first, optimizer, steps=1)


@HABITS.add
def averages_made_after_wrapping(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    average = AveragedModel(model)
    run.train(model, optimizer, then=lambda step: average.update_parameters(model))
    with torch.no_grad():
        run.note(average(batch(0)), sorted(average.state_dict())[:3])


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_copies(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
