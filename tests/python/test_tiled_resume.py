"""Into how many tiles layers are cut is the run's: checkpoints say it, a run under other budgets
can go on with the same bits, and is told where it would not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import CheckpointError
from strata.nn.tiles import Tiled
from test_frozen import batches, train, trained, with_adapters, wrap
from torch import nn
from variants import thorough

SMALL, LARGE = "1792KiB", "64MiB"
STEPS = [batch[:1, :8] for batch in batches(4)]


def wrapped_in(folder: Path, device: str, model: nn.Module, form: str) -> tuple[nn.Module, Any]:
    folder.mkdir(exist_ok=True)
    memory = {"device": device, "host": "64MiB", "ssd": "64MiB"}
    return wrap(model, form, memory=memory, ssd_path=folder, page_size="64KiB")


def tiles_of(model: nn.Module) -> dict[str, int]:
    return {n: len(m.tiles) for n, m in model.named_modules() if isinstance(m, Tiled)}


@pytest.mark.parametrize("form", ["nf4", thorough("as-is")])
@pytest.mark.parametrize("kind", ["save", "snapshot"])
def test_a_larger_device_goes_on_with_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, form: str
) -> None:
    small, optimizer = wrapped_in(tmp_path / "drive", SMALL, with_adapters(1), form)
    chosen = tiles_of(small)  # nobody asked for them
    assert chosen
    train(small, optimizer, STEPS[:2])
    if kind == "save":
        strata.save(small, tmp_path / "c")
    else:
        strata.snapshot(small, tmp_path / "c").wait()
    losses = train(small, optimizer, STEPS[2:])
    expected = trained(wrapped(small))
    strata.unwrap(small)

    # 1. As there: nothing is said.
    model = with_adapters(1)
    assert strata.checkpoint.tile_as(model, tmp_path / "c") == chosen
    large, optimizer = wrapped_in(tmp_path / "drive", LARGE, model, form)
    assert tiles_of(large) == chosen
    with caplog.at_level(logging.WARNING, "strata"):
        strata.load(large, tmp_path / "c")
    assert "cut otherwise" not in caplog.text
    assert train(large, optimizer, STEPS[2:]) == losses
    assert all(map(torch.equal, trained(wrapped(large)), expected))
    strata.unwrap(large)

    # 2. Otherwise: it goes on, and says what may differ and what helps.
    large, optimizer = wrapped_in(tmp_path / "drive", LARGE, with_adapters(1), form)
    assert not tiles_of(large)
    with caplog.at_level(logging.WARNING, "strata"):
        strata.load(large, tmp_path / "c")
    layer, count = min(chosen.items())
    assert f"'{layer}', whole here and in {count} tiles there" in caplog.text
    assert "strata.checkpoint.tile_as(model, path) ahead of strata.wrap()" in caplog.text
    assert train(large, optimizer, STEPS[2:]) == pytest.approx(losses, rel=3e-2)
    strata.unwrap(large)


def test_a_run_without_tiles_says_so_where_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large, _ = wrapped_in(tmp_path / "drive", LARGE, with_adapters(1), "nf4")
    strata.save(large, tmp_path / "c")
    strata.unwrap(large)
    assert strata.checkpoint.tile_as(with_adapters(1), tmp_path / "c") == {}
    small, _ = wrapped_in(tmp_path / "drive", SMALL, with_adapters(1), "nf4")
    with caplog.at_level(logging.WARNING, "strata"):
        strata.load(small, tmp_path / "c")
    layer, count = min(tiles_of(small).items())
    assert f"'{layer}', in {count} tiles here and whole there" in caplog.text
    strata.unwrap(small)


def test_what_cannot_be_cut_as_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        strata.checkpoint.tile_as(with_adapters(1), tmp_path / "nowhere")
    model, _ = wrapped_in(tmp_path / "drive", LARGE, with_adapters(4), "nf4")
    strata.save(model, tmp_path / "c")
    with pytest.raises(ValueError, match="this model is wrapped"):
        strata.checkpoint.tile_as(model, tmp_path / "c")
    strata.unwrap(model)
    with pytest.raises(ValueError, match=r"is cut into tiles already"):
        strata.checkpoint.tile_as(with_adapters(4), tmp_path / "c")
    with pytest.raises(ValueError, match=r"the model has no module 'base_model\."):
        strata.checkpoint.tile_as(nn.Sequential(nn.Linear(2, 2)), tmp_path / "c")
