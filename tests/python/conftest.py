"""The tests of the package run twice: on the in-memory double of the core, and on the real one."""

import sys
from types import ModuleType

import fake_core
import pytest
import strata
import strata._core
import torch

torch.set_num_threads(1)  # toy models: more threads only wait for each other


@pytest.fixture(params=["fake", "real"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What strata.wrap() builds sessions from during this test."""
    module = fake_core if request.param == "fake" else strata._core
    monkeypatch.setattr(sys.modules["strata.wrap"], "_core", module)
    return module
