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

# Where one is refused, the message is strata's, and whatever comes later in the process works.
TRANSFORMS = """
from torch import func

x = torch.randn(2, 32)
transforms = {
    "vmap": lambda m: func.vmap(m)(x.view(2, 1, 32)),
    "grad": lambda m: func.grad(lambda y: m(y).sum())(x),
    "vmap of grad": lambda m: func.vmap(func.grad(lambda y: m(y).sum()))(x),
    "vjp": lambda m: func.vjp(m, x)[1](torch.ones(2, 32)),
    "jvp": lambda m: func.jvp(m, (x,), (x,)),
    "jacrev": lambda m: func.jacrev(lambda y: m(y).sum(0))(x),
    "jacfwd": lambda m: func.jacfwd(lambda y: m(y).sum(0))(x),
    "hessian": lambda m: func.hessian(lambda y: m(y).square().sum())(x),
    "grad of a part": lambda m: func.grad(lambda y: m[1](y).sum())(x),
}
failed = []
for name, transform in transforms.items():
    expected = transform(plain)
    try:
        torch.testing.assert_close(transform(model), expected, rtol=1e-5, atol=1e-5)
    except Exception as error:
        if "strata" not in str(error):
            failed.append(f"{name}: {type(error).__name__}: {error}")
    torch.testing.assert_close(transform(plain), expected)
train()
torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
assert not failed, failed
"""


@pytest.mark.parametrize(
    "program", [SAFETENSORS_AS_BYTES, TRANSFORMS], ids=["safetensors", "transforms"]
)
def test_alone(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN + program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
