"""strata.save writes safetensors that plain tools read, and again only what has changed."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import strata
import torch
from strata._storage import shards
from strata._storage.checkpoint_files import CheckpointError, find, read_manifest
from test_checkpoint import Case, llama
from test_snapshot import SSD, drive, links
from torch import nn
from variants import thorough

ROOMY = {"device": "8MiB", "host": "32MiB"}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that a plain tool finds, each once."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no dictionary)
                assert key not in found
                found[key] = file.get_tensor(key)
    return found


def expected(case: Case) -> dict[str, torch.Tensor]:
    found = dict(case.model.named_buffers(remove_duplicate=True))
    found = {n: b for n, b in found.items() if n in case.model.state_dict()}
    for i, name in enumerate(case.state.names):
        found[name] = case.state.read(i)
        if case.state.config["params"][i]["trainable"]:
            found[f"{name}.exp_avg"] = case.state.read(i, "moment1")
            found[f"{name}.exp_avg_sq"] = case.state.read(i, "moment2")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_tools_read_names_dtypes_and_values(tmp_path: Path, dtype: torch.dtype) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama(), dtype=dtype)
    case.train(2)
    held = expected(case)
    strata.save(case.model, tmp_path / "c", extra={"batch": 2})
    after = case.train(2)
    assert same(tensors(tmp_path / "c"), held)
    assert {v.dtype for v in tensors(tmp_path / "c").values()} == {torch.float32}
    assert links(tmp_path / "drive") == []
    case.close()
    shutil.move(tmp_path / "c", tmp_path / "moved")
    again = Case(drive(tmp_path, "other"), ROOMY, llama(), dtype=dtype)
    assert strata.load(again.model, tmp_path / "moved") == {"batch": 2}
    assert again.train(2) == after
    again.close()


@pytest.mark.parametrize(
    "mode", [{"update": "in_backward"}, {"update": strata.LockFree(0)}, {"state_dtype": "8bit"}]
)
def test_training_goes_on_in_every_mode(tmp_path: Path, mode: dict[str, Any]) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama(), **mode)
    case.train(2)
    strata.save(case.model, tmp_path / "c")
    after = case.train(2)
    strata.load(case.model, tmp_path / "c")
    assert case.train(2) == after
    case.close()


def test_one_is_saved_while_a_snapshot_is_taken(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    case.train(2)
    snapshot = strata.snapshot(case.model, tmp_path / "run")
    strata.save(case.model, tmp_path / "c")
    after = case.train(1)
    snapshot.wait()
    for path in (tmp_path / "c", tmp_path / "run"):
        strata.load(case.model, path)
        assert case.train(1) == after
    case.close()


def test_a_failure_is_told_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    case.train(1)
    strata.save(case.model, tmp_path / "c")
    before = tensors(tmp_path / "c")
    case.train(1)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "write", full)
    with pytest.raises(OSError, match="No space left"):
        strata.save(case.model, tmp_path / "c")
    assert same(tensors(tmp_path / "c"), before)
    assert links(tmp_path / "drive") == []
    assert sorted(os.listdir(tmp_path)) == ["c", "drive"]
    case.close()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 512, dtype=torch.bfloat16).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(512, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.base(x.bfloat16()).float())


def frozen(path: Path, **more: Any) -> Case:
    torch.manual_seed(0)
    memory = {"device": "1MiB", "host": "8MiB", "ssd": "64MiB"}
    return Case(path, memory, Frozen(), **more)


def step(case: Case, expert: int) -> None:
    case.model(torch.randn(4, 64), expert).square().mean().backward()
    case.optimizer.step()
    case.optimizer.zero_grad()


def inodes(folder: Path) -> dict[str, int]:
    """By tensor."""
    return {
        record["file"] + entry["name"] + record["kind"]: (folder / record["file"]).stat().st_ino
        for entry in read_manifest(folder)["params"]
        for record in entry["tensors"]
    }


def test_what_did_not_change_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = shards.ShardWriter.write

    def noted(self: Any, tensor: Any, chunks: Any) -> Any:
        written.append(tensor.key)
        return write(self, tensor, chunks)

    monkeypatch.setattr(shards.ShardWriter, "write", noted)
    case = frozen(drive(tmp_path, "drive"))
    for expert in range(4):
        step(case, expert)
    strata.save(case.model, tmp_path / "1")
    step(case, 2)
    written.clear()
    strata.save(case.model, tmp_path / "2")
    assert not any("base" in key for key in written)
    # The experts shared files; from here on those that rest are apart.
    step(case, 2)
    written.clear()
    strata.save(case.model, tmp_path / "3")
    assert {key.split(".weight")[0].split(".bias")[0] for key in written} == {"experts.2"}
    masters = case.masters()
    case.close()
    for gone in ("1", "2"):
        shutil.rmtree(tmp_path / gone)
    again = frozen(drive(tmp_path, "other"))
    strata.load(again.model, tmp_path / "3")
    assert all(map(torch.equal, again.masters(), masters))
    written.clear()
    strata.save(again.model, tmp_path / "4")  # the series goes on
    assert written == []
    with torch.no_grad():
        again.model.base.weight[0, 0] += 1  # by hand
    strata.save(again.model, tmp_path / "4")
    assert written == ["base.weight", "base.bias"] or written == ["base.bias", "base.weight"]
    again.close()


def test_a_file_that_somebody_touched_is_written_again(tmp_path: Path) -> None:
    case = frozen(drive(tmp_path, "drive"))
    step(case, 0)
    strata.save(case.model, tmp_path / "1")
    for path in (tmp_path / "1").glob("*.safetensors"):
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x99")
    strata.save(case.model, tmp_path / "2")
    assert not set(inodes(tmp_path / "1").values()) & set(inodes(tmp_path / "2").values())
    strata.load(case.model, tmp_path / "2")
    with pytest.raises(CheckpointError, match="is damaged"):
        strata.load(case.model, tmp_path / "1")
    case.close()


def test_files_beside_a_checkpoint_stay(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    case.train(2)
    strata.save(case.model, tmp_path / "c", extra={"batch": 2})
    (tmp_path / "c" / "notes.txt").write_text("mine")
    after = case.train(2)
    assert strata.load(case.model, tmp_path / "c") == {"batch": 2}
    assert case.train(2) == after
    for _ in range(2):
        strata.save(case.model, tmp_path / "c")
        assert sorted(os.listdir(tmp_path / "c")) == [
            *("manifest.json", "moments-00001.safetensors"),
            *("notes.txt", "parameters-00001.safetensors"),
        ]
    case.close()


@pytest.mark.parametrize("seconds", [0.03, thorough(0.15)])
def test_a_killed_save_leaves_the_last_complete_one(tmp_path: Path, seconds: float) -> None:
    disk = drive(tmp_path, "drive")
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        case = Case(disk, SSD, llama())
        torch.manual_seed(7)
        for number in range(1000):
            case.train(1)
            strata.save(case.model, tmp_path / "c", extra={"n": number + 1})
            if number == 1:
                os.write(begins, b"!")
        os._exit(1)
    assert os.read(begun, 1) == b"!"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert find(tmp_path / "c") is not None
    again = Case(disk, SSD, llama())
    steps = strata.load(again.model, tmp_path / "c")["n"]
    found = again.masters()
    after = again.train(2)
    strata.save(again.model, tmp_path / "c")
    assert not [e for e in os.listdir(tmp_path) if e.startswith("c.strata-")]
    again.close()
    plain = Case(drive(tmp_path, "plain"), SSD, llama())
    torch.manual_seed(7)
    plain.train(steps)
    assert all(map(torch.equal, plain.masters(), found))
    assert plain.train(2) == after
    plain.close()
