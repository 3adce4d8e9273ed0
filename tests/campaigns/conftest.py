"""Runs campaigns on the host, with one thread for each process.

pytest tests/campaigns                                  # a few minutes: a sample of each
STRATA_KILLS=1000 pytest tests/campaigns -k killed      # README.md of tests/ lists the variables
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quick_costs import quick_costs  # noqa: F401 (a fixture)
from rank_server import Ranks

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported objects stay: neither this process's nor a forked child's collections visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The server that starts ranks, with the scenarios of this folder."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with Ranks() as server:
        yield server
