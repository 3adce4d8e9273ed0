"""Every path may be a string, bytes or anything with __fspath__(), and nothing else."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage import trace_file
from torch import nn

MEMORY = {"device": "1MiB", "host": "4MiB"}


class Bytes:
    """As libraries of file systems have them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> bytes:
        return os.fsencode(self.path)


def small() -> nn.Module:
    """The backward of its second layer reads weights: a step with none is not recorded."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def wrapped(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small()
    memory = MEMORY | ({"ssd": "32MiB"} if "ssd_path" in options else {})
    return strata.wrap(model, torch.optim.AdamW(model.parameters()), memory=memory, **options)


@pytest.mark.parametrize("kind", [os.fsencode, Bytes])
def test_all_that_take_a_path_take_it(tmp_path: Path, kind: Callable[[Path], Any]) -> None:
    # 1. Folders of the SSD: one, and several.
    for drive in ("a", "b"):
        (tmp_path / drive).mkdir()
    strata.unwrap(wrapped(ssd_path=kind(tmp_path / "a"))[0])
    model, optimizer = wrapped(ssd_path=[kind(tmp_path / "a"), str(tmp_path / "b")])
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # 2. What is written and read.
    strata.save(model, kind(tmp_path / "saved"))
    strata.snapshot(model, kind(tmp_path / "series")).wait()
    strata.export_safetensors(model, kind(tmp_path / "out"))
    for place in ("saved", "series"):
        strata.load(model, kind(tmp_path / place))
    strata.report(model).save(kind(tmp_path / "report"))
    assert strata.Report.load(kind(tmp_path / "report")).steps == 2
    strata.save_trace(model, kind(tmp_path / "trace"))
    assert trace_file.load(kind(tmp_path / "trace")).trace.units
    strata.unwrap(model)
    assert strata.checkpoint.tile_as(model, kind(tmp_path / "saved")) == {}
    # 3. Values to begin with.
    with torch.device("meta"):
        empty = small()
    weights = kind(tmp_path / "out")
    adamw = torch.optim.AdamW(empty.parameters())
    strata.wrap(empty, adamw, memory=MEMORY, weights=weights)
    assert torch.equal(empty[0].weight, model[0].weight)
    # 4. DeepSpeed's configuration.
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert strata.from_deepspeed(kind(tmp_path / "ds.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssd_path": 3}, "ssd_path must be a path .* not 3"),
        ({"ssd_path": ["/tmp", None]}, "ssd_path must be a path .* not None"),
        ({"weights": 3}, "weights must be a path .* not 3"),
    ],
)
def test_what_is_no_path_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wrapped(**options)


def test_an_empty_name_in_bytes_is_refused_too() -> None:
    with pytest.raises(ValueError, match="ssd_path is empty"):
        wrapped(ssd_path=b"")


def test_files_are_refused_by_name_where_no_path_is_given() -> None:
    model, _ = wrapped()
    files: list[Any] = [strata.save, strata.load, strata.snapshot, strata.export_safetensors]
    for function in files:
        with pytest.raises(TypeError, match=r"path must be a path .* not None"):
            function(model, None)


def test_a_name_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    with pytest.raises(ValueError, match=r"ssd_path .* is not UTF-8"):
        wrapped(ssd_path=folder)
    with pytest.raises(ValueError, match=r"path .* is not UTF-8"):
        strata.save(wrapped()[0], folder)
