"""Many tests of the package can run twice: on the real core, and on its in-memory double.

pytest tests/python                    # on the host, both
pytest tests/python --core real        # what `./dev test` runs
pytest tests/python --device cuda      # losses, ordinary code, update modes and graphs, on a GPU
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import fake_core
import pytest
import strata
import strata._api
import strata._config.device
import strata._core
import torch
from finetune_runs import place  # noqa: F401 (a fixture)
from quick_costs import quick_costs  # noqa: F401 (a fixture)
from rank_server import Ranks

# A shell may start what is in the background with Ctrl-C ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # toy models: more threads only wait for each other

# Plain PyTorch is the oracle.
ON_DEVICE = (
    "test_golden",
    "test_graphs",
    "test_ordinary",
    "test_ranks_gpu",
    "test_steady",
    "test_update_modes",
)
PAGE_ON_DEVICE = "2MiB"  # no GPU maps less
HOST_ON_DEVICE = "2GiB"  # toy models take a page for each of their tensors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="host", help="run the suites that can on it, such as cuda")
    parser.addoption("--core", default="both", choices=("both", "real"), help="both: also a double")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host_only: needs the device's memory to be the CPU's")
    config.addinivalue_line("markers", "gpu_only: needs --device cuda")
    if config.getoption("--device") != "host":
        # The same bits each time, in workspaces that toy budgets have room for.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--core") == "real":  # without what runs on the double as well
        names = {item.nodeid for item in items}
        items[:] = [
            i for i in items if i.nodeid.replace("[fake", "[real") not in names - {i.nodeid}
        ]
    name = strata._config.device.parse(config.getoption("--device"))
    if name == "host":
        for item in items:
            if item.get_closest_marker("gpu_only"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: --device cuda"))
        return
    missing = strata._config.device.why_not(name)
    for item in items:
        assert isinstance(item, pytest.Function)
        reason = missing
        if item.module.__name__ not in ON_DEVICE or item.get_closest_marker("host_only"):
            reason = "runs on the host only"
        elif hasattr(item, "callspec") and item.callspec.params.get("core") == "fake":
            reason = "the double of the core has no GPU"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """What is imported by now stays: the garbage collector need not look at it, a million objects,
    each time that a model is wrapped."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With --device: models and batches are made there, and wrapped with pages that it can map.
    Without: on a machine with a GPU "auto" means the host, too."""
    name = request.config.getoption("--device")
    if name == "host":
        if torch.cuda.is_available():
            monkeypatch.setattr(
                strata._config.device, "why_not", lambda name: "these tests are the host's"
            )
        yield
        return

    def there(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, optimizer: Any, **options: Any) -> Any:
            memory = {**options.pop("memory", {}), "host": HOST_ON_DEVICE}
            options |= {"device": name, "memory": memory, "page_size": PAGE_ON_DEVICE}
            return function(model, optimizer, **options)

        return call

    monkeypatch.setattr(strata, "wrap", there(strata.wrap))
    monkeypatch.setattr(strata, "plan", there(strata.plan))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device(name)
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["fake", "real"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What strata.wrap() builds sessions from during this test."""
    module = fake_core if request.param == "fake" else strata._core
    for name in ("strata._api", "strata._opening", "strata._config.device"):
        monkeypatch.setattr(sys.modules[name], "_core", module)
    return module


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """What starts the ranks of all tests."""
    with Ranks(quick="not thorough" in request.config.getoption("-m")) as server:
        yield server
