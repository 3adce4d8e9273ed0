"""get_extra_state() and set_extra_state() of modules, which torch has in state dicts."""

from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage.checkpoint_files import MANIFEST_NAME, read_manifest, write_manifest
from torch import nn

MEMORY = {"device": "1MiB", "host": "4MiB"}


class Counts(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen: Any = {"forwards": 0, "sums": torch.zeros(2), "names": ("a", b"\x00")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.seen, dict):
            self.seen = {**self.seen, "forwards": self.seen["forwards"] + 1}
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Whole(nn.Module):
    """Has some of its own beside those of what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Counts(), Counts()])
        self.scale: Any = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.parts[1](self.parts[0](x))
        return y

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def make(tmp_path: Path | None = None, kind: type[nn.Module] = Whole, **options: Any) -> Any:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if tmp_path is not None:
        options |= {"ssd_path": tmp_path, "page_size": "64KiB", "memory": MEMORY | {"ssd": "16MiB"}}
    return strata.wrap(model, optimizer, **({"memory": MEMORY, "activations": None} | options))


def trained(tmp_path: Path | None = None) -> Any:
    model, optimizer = make(tmp_path)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.scale = torch.full((3,), 7.0)
    model.parts[1].seen["sums"] += 5
    return model


@pytest.mark.parametrize("how", ["save", "snapshot"])
def test_it_comes_back(tmp_path: Path, how: str) -> None:
    (tmp_path / "ssd").mkdir()
    model = trained(tmp_path / "ssd")
    if how == "snapshot":
        handle = strata.snapshot(model, tmp_path / "saved")
        model.parts[1].seen["sums"] += 1  # it is kept as it was
        handle.wait()
    else:
        strata.save(model, tmp_path / "saved")
    other, _ = make()
    strata.load(other, tmp_path / "saved")
    assert torch.equal(other.scale, torch.full((3,), 7.0))
    assert [part.seen["forwards"] for part in other.parts] == [3, 3]
    assert other.parts[1].seen["sums"].tolist() == [5, 5]
    assert other.parts[0].seen["names"] == ("a", b"\x00")
    strata.load(model, tmp_path / "saved")
    assert model.parts[1].seen["sums"].tolist() == [5, 5]


def test_what_cannot_be_kept_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    model = trained(tmp_path / "ssd")
    strata.save(model, tmp_path / "saved")
    text = (tmp_path / "saved" / MANIFEST_NAME).read_text()
    model.parts[0].seen = lambda: None
    with pytest.raises(TypeError, match=r"parts\.0\._extra_state holds what no checkpoint can"):
        strata.save(model, tmp_path / "saved")
    with pytest.raises(TypeError, match=r"parts\.0\._extra_state holds what no checkpoint can"):
        strata.snapshot(model, tmp_path / "runs")
    assert (tmp_path / "saved" / MANIFEST_NAME).read_text() == text


def test_what_nobody_takes_or_reads_is_refused_first(tmp_path: Path) -> None:
    model = trained()
    strata.save(model, tmp_path / "saved")
    manifest = read_manifest(tmp_path / "saved")
    for change, message in (
        ({"elsewhere._extra_state": manifest["extra_state"]["_extra_state"]}, "no module for"),
        ({"_extra_state": "no base64"}, "is damaged"),
        (3, "'extra_state' is 3, and should be an object"),
    ):
        write_manifest(tmp_path / "saved", {**manifest, "extra_state": change})
        before = {name: value.clone() for name, value in model.named_parameters()}
        with pytest.raises(strata.CheckpointError, match=message):
            strata.load(model, tmp_path / "saved")
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_exports_have_tensors_and_say_what_they_have_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained()
    strata.export_safetensors(model, tmp_path / "out")
    assert "parts.0._extra_state is not exported" in caplog.text
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    for weights, forwards in (("out", 0), ("whole.pt", 3)):
        with torch.device("meta"):
            empty = Whole()
        for part in empty.parts:
            part.seen = {"forwards": 0}
        adamw = torch.optim.AdamW(empty.parameters())
        other, _ = strata.wrap(empty, adamw, memory=MEMORY, weights=tmp_path / weights)
        assert torch.equal(other.scale, torch.full((3,), 7.0))
        assert other.parts[0].seen["forwards"] == forwards
