"""Optimizers and schedules that strata.from_deepspeed() makes."""

from typing import Any

import pytest
import strata
import torch
from test_from_deepspeed import arguments


@pytest.mark.parametrize(
    ("given", "kind", "group"),
    [
        # DeepSpeed's Adam decouples weight decay, and has none unless it is given.
        ({"type": "Adam"}, torch.optim.AdamW, {"weight_decay": 0.0, "lr": 1e-3}),
        ({"type": "adamw", "params": {"lr": 1e-4}}, torch.optim.AdamW, {"lr": 1e-4}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, {}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW,
         {"weight_decay": 0.01}),
        ({"type": "Lion"}, strata.Lion, {"betas": (0.9, 0.999), "lr": 1e-3}),
        ({"type": "Adagrad", "params": {"lr": 0.1}}, torch.optim.Adagrad, {"lr": 0.1}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD,
         {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_optimizers_are_those_that_deepspeed_would_make(
    given: dict[str, Any], kind: type, group: dict[str, Any]
) -> None:
    keywords = strata.from_deepspeed({"optimizer": given})
    made = keywords.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(made) is kind
    assert {name: made.param_groups[0][name] for name in group} == group


def rates(config: dict[str, Any], steps: int, lr: float = 0.5) -> list[float]:
    keywords = strata.from_deepspeed({"scheduler": config})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = keywords.scheduler(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_have_deepspeeds_rates() -> None:
    # What the schedules of DeepSpeed 0.19.6 gave, step by step.
    warmup = {"warmup_min_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates({"type": "WarmupLR", "params": warmup}, 7) == pytest.approx(
        [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    )
    decay = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1.0}
    assert rates({"type": "WarmupDecayLR", "params": decay}, 9) == pytest.approx(
        [0, 0, 1.0, 1.0, 0.75, 0.5, 0.25, 0, 0]
    )
    cosine = {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.2}
    assert rates({"type": "WarmupCosineLR", "params": cosine}, 8) == pytest.approx(
        [0, 0, 0.5, 0.44142136, 0.3, 0.15857864, 0.1, 0.1]
    )
    step = {"step_size": 2, "gamma": 0.1}
    assert rates({"type": "StepLR", "params": step}, 3) == pytest.approx([0.5, 0.5, 0.05])


def test_a_schedule_resumes() -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}
    keywords = strata.from_deepspeed(config)
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1) for _ in "ab")
    before = keywords.scheduler(first)
    for _ in range(3):
        first.step()
        before.step()
    after = keywords.scheduler(second)
    after.load_state_dict(before.state_dict())
    second.step()
    after.step()
    first.step()
    before.step()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]


def test_the_length_of_the_run_is_asked_for() -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="pass steps="):
        strata.from_deepspeed(config).scheduler(optimizer)
    assert strata.from_deepspeed(config).scheduler(optimizer, steps=7).total_steps == 7
    keywords = strata.from_deepspeed(config, arguments(max_steps=30))
    assert keywords.scheduler(optimizer).total_steps == 30
    missing = {"scheduler": {"type": "WarmupDecayLR"}}
    with pytest.raises(ValueError, match="WarmupDecayLR needs total_num_steps"):
        strata.from_deepspeed(missing).scheduler(optimizer)
