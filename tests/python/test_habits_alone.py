"""Habits that would end or spoil the process that they fail in, each in one of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import copy, torch, strata
from torch import nn

torch.manual_seed(0)
plain = nn.Sequential(*[nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3)])
model = copy.deepcopy(plain)
memory = {"device": "64MiB", "host": "64MiB"}
model, optimizer = strata.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), memory=memory)
own = torch.optim.SGD(plain.parameters(), lr=0.1)


def train():
    for m, o in ((plain, own), (model, optimizer)):
        for seed in range(3):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
            m(x).square().mean().backward()
            o.step()
            o.zero_grad()


train()
"""

SAFETENSORS_AS_BYTES = """
import safetensors.torch

values = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
for name, p in plain.named_parameters():
    torch.testing.assert_close(values[name], p.detach(), rtol=1e-5, atol=1e-5)
"""

# Where it is refused, whatever comes later in the process works as before.
MAPPED_OVER_A_BATCH = """
x = torch.randn(2, 6, 32)
try:
    torch.testing.assert_close(torch.func.vmap(model)(x), plain(x), rtol=1e-5, atol=1e-5)
except (RuntimeError, NotImplementedError) as error:
    assert "strata" in str(error), error
train()
torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
with torch.autograd.forward_ad.dual_level():
    plain(torch.autograd.forward_ad.make_dual(x, x))
"""


@pytest.mark.parametrize(
    "program", [SAFETENSORS_AS_BYTES, MAPPED_OVER_A_BATCH], ids=["safetensors", "vmap"]
)
def test_alone(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN + program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
