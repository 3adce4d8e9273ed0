"""Random small models under random modes and budgets, against plain PyTorch.

STRATA_SEEDS=30 pytest tests/python/test_random_models.py     # more of them
STRATA_SEED=7 pytest tests/python/test_random_models.py       # replays one
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from random_models import Case
from strata._errors import StrataError
from torch import nn

SPARE_BYTES = 1 << 20  # for activations and what PyTorch itself holds
SEEDS = max(6, int(os.environ.get("STRATA_SEEDS", "0")))
ONE = os.environ.get("STRATA_SEED")
UPDATES: tuple[Any, ...] = ("on_step", "in_backward", strata.LockFree(max_staleness=0))
ACTIVATIONS = ("auto", "keep", "swap", "recompute", None)
TOLERANCE = 2e-5  # of kernels that round otherwise than torch's


def settings(seed: int) -> list[dict[str, Any]]:
    """Every mode of updates, each with activations and budgets of its own."""
    pick = random.Random(seed)
    modes = pick.sample(ACTIVATIONS, len(UPDATES))
    return [
        {"update": update, "activations": mode, "tight": pick.random() < 0.7, "ssd": ssd}
        for update, mode, ssd in zip(
            UPDATES, modes, pick.sample([True, True, False], 3), strict=True
        )
    ]


def least_host(
    model: nn.Module, optimizer: torch.optim.Optimizer, memory: Any, options: Any
) -> int:
    """Within a factor of two."""
    for shift in range(18, 27):
        try:
            strata.plan(model, optimizer, memory={**memory, "host": 1 << shift}, **options)
        except StrataError:
            continue
        return 1 << shift
    raise AssertionError("no host memory would do")


def run(case: Case, setting: dict[str, Any], folder: Path) -> tuple[list[float], nn.Module]:
    """What planned activations need is known behind the first step, which may refuse the budgets.
    Nothing else may: without them, budgets that were accepted do."""
    for factor in (1, 2, 4):
        try:
            return case.run(wrapped(setting, folder, factor))
        except StrataError as error:
            if "would do" not in str(error) or setting["activations"] is None:
                raise
    raise AssertionError("four times the least host memory is refused")


def wrapped(setting: dict[str, Any], folder: Path, factor: int = 1) -> Any:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        options = {key: setting[key] for key in ("update", "activations")}
        options |= {"page_size": "64KiB", "workers": 1}
        memory: dict[str, Any] = {"device": "64MiB", "host": "64MiB"}
        if setting["ssd"]:
            memory["ssd"] = "64MiB"
            options["ssd_path"] = folder
        if setting["tight"]:
            needs = strata.plan(model, optimizer, memory=memory, **options)
            least = needs.plan["device_bytes_min"]
            spare = 0 if setting["activations"] is None else SPARE_BYTES
            if len(set(model.order)) < len(model.order):  # a block may stay beside another
                spare = max(spare, least)
            memory["device"] = least + spare
            memory["host"] = factor * least_host(model, optimizer, memory, options)
        return strata.wrap(model, optimizer, memory=memory, **options)

    return wrap


def check_values(values: Any, expected: Any, tolerance: float, told: str) -> None:
    for name, value in expected.items():
        where = f"{told}: {name}"
        torch.testing.assert_close(
            values[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, w=where: f"{w}: {m}"
        )


@pytest.mark.parametrize("seed", [int(ONE)] if ONE else range(SEEDS))
def test_modes_and_budgets_change_no_result(seed: int, tmp_path: Path) -> None:
    case = Case(seed)
    expected, plain = case.run(lambda model, optimizer: (model, optimizer))
    first: tuple[list[float], dict[str, torch.Tensor]] | None = None
    for setting in settings(seed):
        told = f"seed {seed}, {case.optimizer}, {setting}"
        losses, model = run(case, setting, tmp_path)
        values = {name: value.clone() for name, value in strata.unwrap(model).state_dict().items()}
        tolerance = 0.0 if case.exact else TOLERANCE
        assert losses == pytest.approx(expected, rel=tolerance, abs=0.0), told
        check_values(values, plain.state_dict(), 5 * tolerance, told)
        if first is None:
            first = (losses, values)
        assert losses == first[0], told
        check_values(values, first[1], 0.0, told)
