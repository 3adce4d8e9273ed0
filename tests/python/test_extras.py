"""The package needs torch, numpy and safetensors; of what else is missing it names the extra."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from strata._errors import EXTRAS
from variants import thorough

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = ("numpy", "safetensors", "torch")
# Python imports this when it starts. What it refuses is as good as not installed.
REFUSAL = """
import importlib.machinery
import sys

class Refusal(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED!r}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Refusal
"""
WHOLE_LIFE = """
import sys
import torch
import strata

def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory = {"device": "1MiB", "host": "4MiB", "ssd": "16MiB"}
    return strata.wrap(model, optimizer, memory=memory, ssd_path=sys.argv[1])

def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        torch.manual_seed(1)
        loss = (model(torch.randn(8, 64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

for name in strata.__all__:
    getattr(strata, name)
model, optimizer = make()
losses = train(model, optimizer, 6)
assert losses[-1] < losses[0]
strata.save(model, sys.argv[1] + "/checkpoint")
strata.export_safetensors(model, sys.argv[1] + "/export")
assert "Sequential" in str(strata.report(model))
before = [p.clone() for p in model.state_dict().values()]
strata.unwrap(model)
model, optimizer = make()
strata.load(model, sys.argv[1] + "/checkpoint")
for old, new in zip(before, model.state_dict().values(), strict=True):
    assert torch.equal(old, new)
train(model, optimizer, 2)
"""


def closure(*names: str) -> set[str]:
    """Packages, and all that they need in turn."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # one for another machine
        needs = [Requirement(line) for line in lines]
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


def others(allowed: set[str]) -> Iterator[str]:
    """Modules of the installed packages that are not among those allowed."""
    for module, packages in importlib.metadata.packages_distributions().items():
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in packages} & allowed:
            yield module


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment as after `pip install strata`, without an extra."""
    refused = sorted({*others(closure(*NEEDED)), *(name for e in EXTRAS.values() for name in e)})
    assert "matplotlib" in refused
    assert "torch" not in refused
    (tmp_path / "sitecustomize.py").write_text(REFUSAL.replace("{REFUSED!r}", repr(refused)))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def told(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_plain_model_lives_its_whole_life(tmp_path: Path, bare: dict[str, str]) -> None:
    assert told(["-c", WHOLE_LIFE, str(tmp_path)], bare) == (0, "")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["finetune", "--model=llama-10m", f"--data={__file__}"], "finetune"),
        (["estimate", "--model=llama-10m", "--memory=device=1GiB,host=1GiB"], "finetune"),
        thorough(["report", "--html=report.html", "report.json"], "plots"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(
    tmp_path: Path, bare: dict[str, str], command: list[str], extra: str
) -> None:
    code = WHOLE_LIFE + "strata.report(model).save(sys.argv[1] + '/report.json')"
    if extra == "plots":
        assert told(["-c", code, str(tmp_path)], bare) == (0, "")
        command = [part.replace("report.json", str(tmp_path / "report.json")) for part in command]
    status, says = told(["-m", "strata", *command], bare)
    assert says.strip().endswith(f"this needs it: pip install 'strata[{extra}]'")
    assert "Traceback" not in says
    assert status == 1


def test_the_doctor_works_without_extras(tmp_path: Path, bare: dict[str, str]) -> None:
    status, says = told(["-m", "strata", "doctor", f"--ssd-path={tmp_path}"], bare)
    assert "pip install 'strata[finetune]'" in " ".join(says.split())
    assert "Traceback" not in says
    assert status == 0, says


def test_what_is_declared_is_what_is_imported() -> None:
    assert sorted(Requirement(line).name for line in PROJECT["dependencies"]) == sorted(NEEDED)
    packages_of = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        declared = {Requirement(line).name for line in PROJECT["optional-dependencies"][extra]}
        packages = {packages_of[module][0].lower() for module in modules}
        assert packages == declared, extra
