"""Snapshots of older versions of strata load, where they have no gradients; what a manifest says of
steps is checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._core import Hasher
from strata._storage.checkpoint_files import CheckpointError, read_manifest, write_manifest
from strata._storage.snapshot_files import FORMAT
from strata._storage.snapshot_pages import page_paths
from test_checkpoint import Case, llama
from test_snapshot import HOST, SSD, drive


@pytest.mark.parametrize(
    ("version", "mode"),
    [(1, {}), (1, {"state_dtype": "8bit"}), (2, {"state_dtype": "8bit"})],
    ids=["1", "1 with scales", "2 with scales"],
)
def test_older_formats_load(tmp_path: Path, version: int, mode: dict[str, Any]) -> None:
    """Version 1 had scales in state.bin, and fewer numbers."""
    case = Case(drive(tmp_path, "drive"), SSD, llama(), **mode)
    case.train(2)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(2)
    manifest = read_manifest(folder)
    assert manifest["snapshot"] == FORMAT
    _list_scales(manifest)
    if version == 1:
        for chunk in manifest["chunks"]:
            chunk["runs"] = [run[:4] for run in chunk["runs"]]
        if mode:
            _put_scales_into_the_state(folder, manifest)
    else:
        _add_gradients(manifest, None)
    write_manifest(folder, manifest | {"snapshot": version})
    strata.load(case.model, tmp_path / "run")  # goes back to its own slots
    assert case.train(2) == after
    case.close()
    for memory, how in ((SSD, {}), (HOST, {"page_size": "64KiB"}), (HOST, {})):
        again = Case(tmp_path / "drive", memory, llama(), **mode, **how)
        strata.load(again.model, tmp_path / "run")
        assert again.train(2) == after
        again.close()
    last = Case(tmp_path / "drive", SSD, llama(), **mode)
    write_manifest(folder, manifest | {"snapshot": FORMAT + 1})
    with pytest.raises(CheckpointError, match=f"version {FORMAT + 1}"):
        strata.load(last.model, tmp_path / "run")
    _add_gradients(manifest, {"params": [], "groups": [], "float32": True, "divisor": 1})
    write_manifest(folder, manifest | {"snapshot": max(version, 2)})
    with pytest.raises(CheckpointError, match="keeps no gradients"):
        strata.load(last.model, tmp_path / "run")
    last.close()


def _add_gradients(manifest: dict[str, Any], gradients: dict[str, Any] | None) -> None:
    """As versions 2 to 8 had them."""
    manifest |= {"gradients": gradients, "zeros": []}
    for chunk in manifest["chunks"]:
        chunk["runs"] = [[*run[:5], 0] for run in chunk["runs"]]
        chunk["grad"] = None


def _list_scales(manifest: dict[str, Any]) -> None:
    """As version 2 had them: all pages, and of each chunk bytes in all of these."""
    pages: list[list[int]] = []
    for chunk in manifest["chunks"]:
        if (page := chunk.pop("scale_page")) is None:
            continue
        if page not in pages:
            pages.append(page)
        first = pages.index(page) * manifest["page_bytes"]
        chunk["scales"] = [first + byte for byte in chunk["scales"]]
    manifest["scales"] = pages or None


def _put_scales_into_the_state(folder: Path, manifest: dict[str, Any]) -> None:
    """One page behind the other, so their bytes have the numbers that they had."""
    page_bytes, state = manifest["page_bytes"], folder / "state.bin"
    raw = b""
    with open(page_paths(manifest, folder)[0], "rb") as file:
        for slot, *_ in manifest["scales"]:
            file.seek(slot * page_bytes)
            raw += file.read(page_bytes)
    digest = Hasher()
    digest.update(raw)
    record = {"kind": "scales", "dtype": "uint8", "offset": state.stat().st_size}
    manifest["scales"] = record | {"bytes": len(raw), "xxh3_64": digest.hexdigest()}
    with open(state, "ab") as file:
        file.write(raw)
    manifest["bytes"] = state.stat().st_size


def test_steps_and_ranks_of_chunks_are_checked(tmp_path: Path) -> None:
    case = Case(drive(tmp_path, "drive"), SSD, llama())
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    manifest = read_manifest(folder)
    before = case.masters()
    for damage in (
        lambda m: m["chunks"][0]["runs"][0].__setitem__(4, -1),
        lambda m: m["chunks"][0]["runs"][0].__setitem__(4, 1.0),
        lambda m: m["chunks"][0]["runs"][0].append(0),
        lambda m: m["chunks"][0].update(rank=1),  # of one that was alone
    ):
        broken = json.loads(json.dumps(manifest))
        damage(broken)
        write_manifest(folder, broken)
        with pytest.raises(CheckpointError):
            strata.load(case.model, tmp_path / "run")
        assert all(map(torch.equal, case.masters(), before))
    case.close()
