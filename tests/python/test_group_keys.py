"""Keys that users and schedulers put into parameter groups are saved and loaded as torch does."""

from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from torch import nn

KEYS: dict[str, Any] = {
    "lr_scale": 0.5,
    "initial_lr": 0.25,
    "name": "body",
    "tensor": torch.arange(3.0),
    "range": (0.1, [float("inf"), None]),
    "by_step": {10: 0.1, 20: (0.2, torch.ones(1))},
    "strata": {"strata.saved": "mine"},
    "bytes": b"\x00\xff",
    "dtype": torch.bfloat16,
}


def wrapped(tmp_path: Path, **keys: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), **keys}])
    memory = {"device": "1MiB", "host": "4MiB", "ssd": "16MiB"}
    return strata.wrap(model, optimizer, memory=memory, ssd_path=tmp_path, page_size="64KiB")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("snapshots", [False, True])
def test_keys_come_back_as_they_were(tmp_path: Path, snapshots: bool) -> None:
    model, optimizer = wrapped(tmp_path, **KEYS)
    step(model, optimizer)
    if snapshots:
        strata.snapshot(model, tmp_path / "runs").wait()
    else:
        strata.save(model, tmp_path / "runs")
    strata.unwrap(model)
    model, optimizer = wrapped(tmp_path, lr_scale="another", mine="stays")
    strata.load(model, tmp_path / "runs")
    group = optimizer.param_groups[0]
    assert group["mine"] == "stays"
    for key, value in KEYS.items():
        found = group[key]
        assert type(found) is type(value)
        if key == "tensor":
            assert torch.equal(found, value)
        else:
            assert found == value
    step(model, optimizer)


@pytest.mark.parametrize("snapshots", [False, True])
def test_what_cannot_be_kept_is_refused_and_replaces_nothing(
    tmp_path: Path, snapshots: bool
) -> None:
    model, optimizer = wrapped(tmp_path, good=1)
    step(model, optimizer)

    def keep() -> None:
        if snapshots:
            strata.snapshot(model, tmp_path / "runs").wait()
        else:
            strata.save(model, tmp_path / "runs")

    keep()
    optimizer.param_groups[0]["bad"] = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"groups\[0\]\['bad'\] holds what no checkpoint can"):
        keep()
    del optimizer.param_groups[0]["bad"]
    optimizer.param_groups[0]["good"] = 2
    strata.load(model, tmp_path / "runs")
    assert optimizer.param_groups[0]["good"] == 1


def test_a_scheduler_made_before_the_load_goes_on(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    strata.save(model, tmp_path / "runs")
    strata.unwrap(model)
    model, optimizer = wrapped(tmp_path)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    strata.load(model, tmp_path / "runs")
    assert optimizer.param_groups[0]["max_lr"] == 0.1


def test_options_of_another_class_are_still_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    optimizer.param_groups[0]["momentum"] = 0.9
    strata.save(model, tmp_path / "runs")
    with pytest.raises(strata.CheckpointError, match="'momentum' is no option of the optimizer"):
        strata.load(model, tmp_path / "runs")
