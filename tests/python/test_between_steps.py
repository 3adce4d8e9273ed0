"""Snapshots and saves keep parameters and the optimizer's state, never gradients: they are taken
after a step, and refused before it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from test_checkpoint import Case, llama
from test_snapshot import HOST, SSD, drive
from variants import quick_first

MODES: list[tuple[dict[str, Any]]] = [
    ({"gradient_accumulation_steps": 3},),
    ({"update": strata.LockFree(max_staleness=2), "workers": 1},),
    ({"dtype": torch.bfloat16},),
    ({"update": "in_backward"},),
]
REFUSED = r"between backward\(\) and step\(\).*optimizer.step\(\)"


def backward(case: Case) -> None:
    tokens = torch.randint(0, 96, (2, 16))
    case.model(input_ids=tokens, labels=tokens).loss.backward()


def ways(case: Case, folder: Path) -> list[Callable[[], Any]]:
    """To keep the state, and wait for that."""
    return [
        lambda: strata.snapshot(case.model, folder / "run").wait(),
        lambda: strata.save(case.model, folder / "saved"),
    ]


@pytest.mark.parametrize("mode", quick_first(MODES, 2))
def test_before_step_they_are_refused_and_change_nothing(
    tmp_path: Path, mode: dict[str, Any]
) -> None:
    masters = []
    for asks in (False, True):
        case = Case(drive(tmp_path, "drive"), SSD, llama(), **mode)
        case.train(1)
        torch.manual_seed(5)
        for _ in range(mode.get("gradient_accumulation_steps", 1)):
            backward(case)
            for way in ways(case, tmp_path) if asks else ():
                with pytest.raises(RuntimeError, match=REFUSED):
                    way()
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "saved").exists()
        case.optimizer.step()
        masters.append(case.masters())
        for way in ways(case, tmp_path) if asks else ():
            way()  # zero_grad() may come later
        case.optimizer.zero_grad()
        case.close()
    if "workers" not in mode:  # else updates are merged by chance
        assert all(map(torch.equal, *masters))
    again = Case(drive(tmp_path, "other"), HOST, llama(), **mode)
    for name in ("run", "saved"):
        strata.load(again.model, tmp_path / name)
        assert all(map(torch.equal, again.masters(), masters[1]))
        assert all(strata.gather_grad(p) is None for p in again.model.parameters())
    again.close()


def test_gradients_that_the_user_gave_wait_for_a_step_too(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    first = next(case.model.parameters())
    given = torch.full_like(first, 0.25)
    first.grad = given
    for way in ways(case, tmp_path):
        with pytest.raises(RuntimeError, match=REFUSED):
            way()
    case.optimizer.step()
    for way in ways(case, tmp_path):
        way()  # it is still p.grad, and was used
    assert first.grad is given
    given.mul_(2)
    with pytest.raises(RuntimeError, match=REFUSED):
        strata.save(case.model, tmp_path / "saved")
    for to_none in (False, True):
        case.optimizer.zero_grad(set_to_none=to_none)
        strata.save(case.model, tmp_path / "saved")
    case.close()


@pytest.mark.parametrize("to_none", [False, True])
def test_zeros_and_forgotten_gradients_wait_for_nothing(tmp_path: Path, to_none: bool) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    backward(case)
    case.optimizer.zero_grad(set_to_none=to_none)
    for way in ways(case, tmp_path):
        way()
    backward(case)
    for parameter in case.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    for way in ways(case, tmp_path):
        way()
    case.close()


def test_updates_that_were_released_end_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With LockFree. Elements may have had different numbers of updates."""
    caplog.set_level(logging.INFO, "strata")
    mode: dict[str, Any] = {"update": strata.LockFree(max_staleness=2), "workers": 1}
    case = Case(drive(tmp_path, "drive"), SSD, llama(), **mode)
    for _ in range(2):
        case.train(4)
        handle = strata.snapshot(case.model, tmp_path / "run")
        expected = case.masters()
        case.train(2)
        handle.wait()
    assert caplog.text.count("lets the updates that were released end") == 1
    case.close()
    steps = []
    for how in (mode, {}):
        again = Case(drive(tmp_path, "other"), HOST, llama(), **how)
        strata.load(again.model, tmp_path / "run")
        assert all(map(torch.equal, again.masters(), expected))
        session = again.state.session
        steps.append([session.param_step(i) for i in range(len(again.state.params))])
        again.train(1)
        again.close()
    assert steps[0] == steps[1]
