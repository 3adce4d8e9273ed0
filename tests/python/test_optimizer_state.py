"""optimizer.state_dict() and torch.save(): tensors without memory, read one at a time."""

import copy
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import build, gpt2, tight, train
from strata._runtime.stand_in import StandIn
from strata._runtime.wrapped import Wrapped
from torch import nn


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3)])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        model(torch.ones(4, 48)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    model = build(make)
    model, optimizer = tight(model, kind(model.parameters(), lr=1e-3, **options))
    steps(model, optimizer)
    return model, optimizer


def tensors(state: dict[str, Any]) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    for number, entry in state["state"].items():
        for name, value in entry.items():
            yield (number, name), value


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    one, other = dict(tensors(left)), dict(tensors(right))
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def saved(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Reads:
    """Counts what is read of moments, and how many of them are in memory at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []
        read = Wrapped.read

        def counted(state: Wrapped, index: int, kind: Any = "master") -> torch.Tensor:
            value = read(state, index, kind)
            self.made.append(weakref.ref(value))
            self.alive.append(sum(made() is not None for made in self.made))
            return value

        monkeypatch.setattr(Wrapped, "read", counted)


def test_nothing_is_read_before_it_is_looked_at(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = trained()
    reads = Reads(monkeypatch)
    state = optimizer.state_dict()
    assert all(isinstance(value, StandIn) for _, value in tensors(state))
    moment = state["state"][0]["exp_avg"]
    assert (moment.shape, moment.dtype, moment.is_leaf) == ((48, 48), torch.float32, True)
    assert moment.to("cpu") is moment.detach() is moment  # as Accelerate moves states
    optimizer.load_state_dict(state)  # what is there need not be read, nor written
    assert not reads.made
    assert moment.abs().max() > 0
    assert len(reads.made) == 1


def test_saving_has_one_tensor_in_memory_and_the_file_plain_ones(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = trained()
    expected = copy.deepcopy(optimizer.state_dict())
    assert not any(isinstance(value, StandIn) for _, value in tensors(expected))
    reads = Reads(monkeypatch)
    loaded = saved(optimizer.state_dict())
    assert len(reads.made) == 12
    assert max(reads.alive) <= 2  # the last one, and the next
    assert all(type(value) is torch.Tensor for _, value in tensors(loaded))
    assert same(loaded, expected)
    assert loaded["param_groups"] == expected["param_groups"]
    assert same(pickle.loads(pickle.dumps(optimizer.state_dict())), expected)


def test_plain_torch_reads_the_file(tmp_path: Path) -> None:
    _, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(copy.deepcopy(optimizer.state_dict()), tmp_path / "plain.pt")
    program = """if True:
        import sys, torch
        one, other = (torch.load(path, weights_only=True)["state"] for path in sys.argv[1:])
        assert all(torch.equal(one[k][n], v) for k, e in other.items() for n, v in e.items())
        assert "strata" not in sys.modules and one.keys() == other.keys()
        print(len(one))
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    files = (tmp_path / name for name in ("optimizer.pt", "plain.pt"))
    found = subprocess.run(
        [sys.executable, "-c", program, *files], env=environment, capture_output=True, check=True
    )
    assert found.stdout.split() == [b"6"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
def test_it_shows_the_state_as_it_is_now(kind: Any) -> None:
    model, optimizer = trained(kind)
    shown, then = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, 1)
    now = copy.deepcopy(optimizer.state_dict())
    assert same(shown, now)
    assert not same(shown, then)
    assert shown["state"][0]["step"] == 3
    optimizer.load_state_dict(then)
    assert same(optimizer.state_dict(), then)
    assert same(shown, now), "another state has taken its place"


def test_a_change_in_place_is_to_a_copy() -> None:
    _, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    state = optimizer.state_dict()
    state["state"][1]["exp_avg"].mul_(2)
    state["state"][0]["exp_avg"][3] = 7.0
    assert (state["state"][0]["exp_avg"][3] == 7).all()
    assert same(optimizer.state_dict(), before)
    optimizer.load_state_dict(state)
    after = optimizer.state_dict()["state"]
    assert torch.equal(after[1]["exp_avg"], before["state"][1]["exp_avg"] * 2)
    assert torch.equal(after[0]["exp_avg"], state["state"][0]["exp_avg"])
    assert torch.equal(after[0]["exp_avg_sq"], before["state"][0]["exp_avg_sq"])


def test_states_may_be_exchanged() -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    entries = state["state"]
    then = copy.deepcopy(entries)
    entries[0], entries[2] = entries[2], entries[0]
    optimizer.load_state_dict(state)
    after = optimizer.state_dict()["state"]
    for mine, other in ((0, 2), (2, 0), (4, 4)):
        assert all(torch.equal(after[mine][n], then[other][n]) for n in then[0])


def test_other_optimizers_take_it_over() -> None:
    model, optimizer = trained()
    plain = build(make)
    plain.load_state_dict(model.state_dict())
    one = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    one.load_state_dict(optimizer.state_dict())
    other_model, other = trained()
    other_model.load_state_dict(plain.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for pair in ((plain, one), (model, optimizer), (other_model, other)):
        steps(*pair)
    assert same(other.state_dict(), optimizer.state_dict())
    for key, value in tensors(one.state_dict()):
        expected = dict(tensors(optimizer.state_dict()))[key]
        torch.testing.assert_close(value.clone(), expected.clone(), rtol=1e-4, atol=1e-7)


def test_the_state_of_a_model_that_was_taken_back_is_refused() -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    strata.unwrap(model)
    for look in (lambda v: v.sum(), saved):
        with pytest.raises(RuntimeError, match=r"strata.unwrap\(\)"):
            look(state["state"][0]["exp_avg"])
    assert "taken back" in repr(state["state"][0]["exp_avg"])


def test_the_old_format_of_torch_is_refused() -> None:
    _, optimizer = trained()
    with pytest.raises(RuntimeError, match="old format"):
        torch.save(optimizer.state_dict(), io.BytesIO(), _use_new_zipfile_serialization=False)


# Parameters -----------------------------------------------------------------------------------


def test_parameters_are_saved_as_torch_saves_them(core: ModuleType) -> None:
    model, optimizer = tight(build(gpt2))
    train(model, optimizer, 1)
    plain = copy.deepcopy(model)
    ours, theirs = saved(model.state_dict()), saved(plain.state_dict())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value)
        assert torch.equal(ours[name], value)
    tied = [loaded[name].data_ptr() for loaded in (ours,) for name in TIED]
    assert tied[0] == tied[1]  # stored once
    weight = model.get_parameter("transformer.wte.weight")
    views = [weight, weight.detach()[3:5], weight.detach().t(), weight.detach().view(torch.int32)]
    for ours, theirs in zip(saved(views), [v.detach().clone() for v in views], strict=True):
        assert torch.equal(ours, theirs)
    parameter = saved([weight])[0]
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad
    assert torch.equal(copy.copy(weight), weight)


TIED = ("transformer.wte.weight", "lm_head.weight")


# Memory ---------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path

import strata
import torch
from torch import nn

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) >> 10

folder = Path(sys.argv[1])
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(50)])
model, optimizer = strata.wrap(
    model, torch.optim.AdamW(model.parameters()), weights="init", ssd_path=folder, workers=1,
    memory={"device": "32MiB", "host": "96MiB", "ssd": "2GiB"}, activations="recompute",
)
for _ in range(2):
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
strata.synchronize(model)
for name, what in (("optimizer", optimizer), ("model", model)):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    torch.save(what.state_dict(), folder / name)
    print((folder / name).stat().st_size >> 20, peak() - before)
"""


@pytest.mark.thorough
def test_saving_takes_no_memory_of_the_size_of_the_state(tmp_path: Path) -> None:
    # A first run calibrates the machine, which leaves a heap with holes behind.
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    (state, state_peak), (model, model_peak) = (
        map(int, line.split()) for line in found.stdout.splitlines()
    )
    assert state >= 400
    assert model >= 200
    assert state_peak < 64
    assert model_peak < 64
