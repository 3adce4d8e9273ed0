"""Parameters without elements, which plain PyTorch takes, are there and do nothing."""

from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from rank_server import Ranks
from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "on_step": {},
    "in_backward": {"update": "in_backward"},
    "lock_free": {"update": strata.LockFree(max_staleness=1)},
    "8bit": {"state_dtype": "8bit"},
    "sums": {"gradient_accumulation_steps": 2},
    "bfloat16": {"dtype": torch.bfloat16},
}


class Empty(nn.Module):
    """Whole layers without elements, and single parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.none = nn.Linear(0, 8, bias=False)
        self.rows = nn.Parameter(torch.empty(4, 0))
        self.flat = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.none(x[:, :0])
        return y + self.rows.sum() + self.flat.sum() + self.frozen.sum()


def make(tmp_path: Path | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Empty()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory = {"device": "1MiB", "host": "4MiB"}
    if tmp_path is not None:
        memory["ssd"] = "32MiB"
        options |= {"ssd_path": tmp_path, "page_size": "64KiB"}
    return strata.wrap(model, optimizer, memory=memory, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_they_train_as_in_plain_pytorch(mode: str) -> None:
    model, optimizer = make(**MODES[mode])
    torch.manual_seed(0)
    plain = Empty().to(MODES[mode].get("dtype"))
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        step(plain, oracle)
        step(model, optimizer)
    entries, expected = optimizer.state_dict()["state"], oracle.state_dict()["state"]
    assert entries.keys() == expected.keys()
    for number, entry in expected.items():
        assert entries[number]["step"] == entry["step"] == 3
        assert entries[number]["exp_avg"].shape == entry["exp_avg"].shape
    model.load_state_dict(plain.state_dict())
    strata.unwrap(model)
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]


def test_gradients_and_values_answer() -> None:
    model, optimizer = make(max_grad_norm=1.0)
    model(torch.ones(2, 8)).sum().backward()
    assert model.rows.grad.shape == (4, 0)
    model.rows.grad.mul_(2)
    model.flat.grad = torch.zeros(0)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        model.rows.mul_(2)
        model.flat.copy_(torch.empty(0))
    assert model.rows.norm() == 0


def test_files_have_them(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    model, optimizer = make(tmp_path / "ssd")
    step(model, optimizer)
    strata.save(model, tmp_path / "saved")
    strata.snapshot(model, tmp_path / "runs").wait()
    strata.export_safetensors(model, tmp_path / "out")
    strata.unwrap(model)
    with torch.device("meta"):
        model = Empty()
    adamw = torch.optim.AdamW(model.parameters())
    memory = {"device": "1MiB", "host": "4MiB"}
    model, optimizer = strata.wrap(model, adamw, memory=memory, weights=tmp_path / "out")
    for place in ("saved", "runs"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        strata.load(model, tmp_path / place)
        assert [e["step"] for e in optimizer.state_dict()["state"].values()] == [1] * 5


def test_a_model_of_nothing_else_is_refused_by_name() -> None:
    model = nn.Linear(0, 4, bias=False)
    with pytest.raises(ValueError, match="Linear has no parameters with elements"):
        strata.wrap(model, torch.optim.AdamW(model.parameters()))


def test_ranks_have_them(ranks: Ranks) -> None:
    assert ranks.run("rank_scenarios.empty_parameters", 2) == [3.0, 3.0]
