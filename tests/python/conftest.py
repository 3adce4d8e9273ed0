"""The tests of the package run twice: on the in-memory double of the core, and on the real one."""

import sys
from types import ModuleType
from typing import Any

import fake_core
import pytest
import strata
import strata._core
import strata.calibrate
import torch

torch.set_num_threads(1)  # toy models: more threads only wait for each other


@pytest.fixture(params=["fake", "real"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What strata.wrap() builds sessions from during this test."""
    module = fake_core if request.param == "fake" else strata._core
    monkeypatch.setattr(sys.modules["strata.wrap"], "_core", module)
    return module


@pytest.fixture(autouse=True)
def quick_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured, but for the tests of measuring."""
    if request.module.__name__ == "test_calibrate":
        return
    lanes = ("compute", "upload", "download", "read", "write", "update")
    costs: dict[str, Any] = {
        "compute_scale": 1.0,
        "upload_bytes_s": 8e9,
        "download_bytes_s": 8e9,
        "read_bytes_s": 2e9,
        "write_bytes_s": 1.5e9,
        "update_elements_s": 1e9,
        "transfer_seconds": 1e-5,
        "slice_seconds": 1e-5,
        "slow": {a: {b: 0.8 for b in lanes if b != a} for a in lanes},
    }
    monkeypatch.setattr(strata.calibrate, "costs", lambda *args, **more: costs)
