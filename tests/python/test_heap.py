"""What wrap() leaves of a model's own memory: nothing."""

import subprocess
import sys

SCRIPT = """
import strata, torch
from torch import nn

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(7 << 20)  # from here on glibc gives blocks of this size no mapping of their own
before = held()
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(48)])
above = torch.ones(1 << 20)  # so that the model is not at the end of the heap
memory = {"device": "32MiB", "host": "1GiB"}
model, _ = strata.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=memory)
stats = model._strata.session.stats()
print(held() - before - stats["host_bytes"] - stats["device_bytes"])
"""


def test_parameters_are_held_once() -> None:
    """In a process of its own: beside the pages there are code and tables of 90 MB, and would be
    the memory that the model had, of 200 MB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150 << 20
