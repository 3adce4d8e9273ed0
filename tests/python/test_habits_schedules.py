"""Rates and groups: schedules, warm-up, layers with rates of their own, what is left out."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import Habit, Habits, Mode, Net, Run, mean_loss
from torch.optim import lr_scheduler as schedulers

HABITS = Habits()


@HABITS.add
def rates_by_layer(run: Run) -> None:
    """Layer-wise decay with keys of one's own, as timm has it."""
    plain = Net()
    groups = []
    for i, module in enumerate([plain.stem, *plain.blocks, plain.head]):
        decayed = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() < 2]
        more = {"lr_scale": 0.7 ** (4 - i), "group_name": f"layer {i}"}
        groups.append({"params": decayed, "weight_decay": 0.05, **more})
        groups.append({"params": others, "weight_decay": 0.0, **more})
    model, optimizer = run.wrap(plain, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3))

    def schedule(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["lr_scale"] / (1 + step)

    schedule(0)
    run.train(model, optimizer, then=schedule)
    run.note([(g["lr"], g["lr_scale"], g["group_name"]) for g in optimizer.param_groups])
    state = copy.deepcopy(optimizer.state_dict())
    run.note([{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]])
    optimizer.load_state_dict(state)
    run.train(model, optimizer, steps=1)


@HABITS.add
def schedules_of_torch(run: Run) -> None:
    for make in (
        lambda o: schedulers.OneCycleLR(o, max_lr=0.02, total_steps=4),
        lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.StepLR(o, 1)], [2]
        ),
    ):
        model, optimizer = run.wrap(Net())
        schedule = make(optimizer)

        def follow(step: int, schedule: Any = schedule) -> None:
            schedule.step()
            run.note(schedule.get_last_lr())

        run.train(model, optimizer, then=follow, steps=3)


@HABITS.add
def plateau_and_swa_rates(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    averaging = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)

    def follow(step: int) -> None:
        if step < 2:
            plateau.step(1.0 + step)
        else:
            averaging.step()
        run.note(optimizer.param_groups[0]["lr"])

    run.train(model, optimizer, then=follow)


@HABITS.add
def warm_up_by_hand(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def rate(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * step / 4))
            group["weight_decay"] = 0.01 * step
            group["betas"] = (0.85 + 0.01 * step, 0.99)

    run.train(model, optimizer, then=rate)


@HABITS.add
def layers_frozen_by_a_rate_of_zero(run: Run) -> None:
    plain = Net()
    head = {"params": list(plain.head.parameters()), "lr": 1e-2}
    trunk = [p for n, p in plain.named_parameters() if not n.startswith("head")]
    model, optimizer = run.wrap(plain, torch.optim.AdamW([head, {"params": trunk, "lr": 0.0}]))

    def thaw(step: int) -> None:
        if step == 1:
            optimizer.param_groups[1]["lr"] = 1e-3

    run.train(model, optimizer, then=thaw)


@HABITS.add
def frozen_in_the_middle(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def freeze(step: int) -> None:
        if step == 1:
            model.blocks[0].requires_grad_(False)
            model.stem.requires_grad_(False)

    run.train(model, optimizer, then=freeze)


@HABITS.add_with(early="none")
def steps_left_out_for_bad_losses(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(5):
        loss = mean_loss(model, step)
        if step == 1:
            loss = loss * float("nan")
        if step == 3:
            loss.backward()
            optimizer.zero_grad()
            continue
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        loss.backward()
        run.note(loss)
        optimizer.step()
        optimizer.zero_grad()


@HABITS.add_with(early="none")
def gradients_checked_before_the_step(run: Run) -> None:
    model, optimizer = run.wrap(Net())
    for step in range(4):
        loss = mean_loss(model, step) * (float("inf") if step == 1 else 1)
        loss.backward()
        good = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        run.note(good, any(torch.isnan(p.grad).any() for p in model.parameters()))
        if good:
            optimizer.step()
        optimizer.zero_grad()


@HABITS.add
def steps_without_gradients(run: Run) -> None:
    """step() before any backward, which silences a warning of schedules."""
    model, optimizer = run.wrap(Net())
    optimizer.zero_grad()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.train(model, optimizer, then=lambda step: schedule.step())
    optimizer.step()


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_schedules(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
