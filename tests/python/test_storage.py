"""Budgets and folders that the real core refuses, warns of or shares, and a disk that lies."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from small_models import adamw, build, llama, train
from strata._config import machine
from torch import nn

TIGHT_SSD = {"device": "1MiB", "host": "2MiB", "ssd": "64MiB"}


def linear_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256)) for _ in range(4)])


def swap_files(folder: Path) -> list[Path]:
    """Those that this process has open: paths that open them, though they have no names."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith(f"{folder}/") and "strata.lock" not in target:
                found.append(entry)
    return found


def steps(model: nn.Module, optimizer: Any, count: int = 3) -> float:
    for _ in range(count):
        loss = model(torch.ones(2, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    strata.synchronize(model)
    return loss.item()


def test_models_of_one_process_share_a_folder(tmp_path: Path) -> None:
    losses = []
    pairs = [
        strata.wrap(m, adamw(m), memory=TIGHT_SSD, ssd_path=tmp_path)
        for m in (linear_layers(), linear_layers())
    ]
    for _ in range(3):
        losses += [steps(model, optimizer, 1) for model, optimizer in pairs]
    assert losses[::2] == losses[1::2]
    assert [file.name for file in tmp_path.iterdir()] == ["strata.lock"], "the files are nameless"
    assert len(swap_files(tmp_path)) == 2
    for model, _ in pairs:
        strata.unwrap(model)
    assert list(tmp_path.iterdir()) == []


def test_a_tmpfs_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    memory = Path("/dev/shm")
    if not os.path.ismount(memory):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        model = linear_layers()
        with caplog.at_level(logging.WARNING, "strata"):
            model, _ = strata.wrap(model, adamw(model), memory=TIGHT_SSD, ssd_path=folder)
        assert f"{folder} is a tmpfs" in caplog.text
        strata.unwrap(model)


def test_a_page_that_changed_on_the_disk_is_named(tmp_path: Path) -> None:
    """Unit, page, file and offset in one exception, and the process goes on."""
    model = linear_layers()
    model, optimizer = strata.wrap(model, adamw(model), memory=TIGHT_SSD, ssd_path=tmp_path)
    strata.synchronize(model)
    (pages,) = swap_files(tmp_path)
    with pages.open("r+b") as file:
        for offset in range(0, pages.stat().st_size, 4096):
            file.seek(offset)
            file.write(b"damaged!")
    with pytest.raises(strata.StrataError, match="checksum") as caught:
        steps(model, optimizer)
    error = caught.value
    assert error.fault == "corrupt"
    assert error.path == f"the swap file in {tmp_path}"
    assert error.page >= 0
    assert error.unit.split()[0] in "0123"
    assert error.offset % (64 << 10) == 0
    del model, optimizer


def test_a_refused_device_budget_names_moment_bytes_and_what_would_do() -> None:
    model = build(llama)
    options: dict[str, Any] = {"memory": {"device": "10KiB", "host": "64MiB"}, "activations": None}
    message = r"10.0 KiB \(10240 bytes\), and forward of model\.\S+ needs .*; device=(\d+) would do"
    for function in (strata.wrap, strata.plan):
        with pytest.raises(strata.StrataError, match=message) as caught:
            function(model, adamw(model), **options)
    least = int(str(caught.value).split("device=")[1].split()[0])
    options["memory"]["device"] = least - 1
    with pytest.raises(strata.StrataError, match=f"device={least} would do"):
        strata.wrap(model, adamw(model), **options)
    options["memory"]["device"] = least
    model, optimizer = strata.wrap(model, adamw(model), **options)
    train(model, optimizer, 1)


def test_pages_get_smaller_where_nested_modules_need_it() -> None:
    """Each unit fits with large pages, all that is entered at once does not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024))
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) * self.scale
            return x

    model = Scaled()
    memory = {"device": (4 << 20) + (128 << 10), "host": "256MiB"}
    report = strata.plan(model, adamw(model), memory=memory)
    assert report.plan["page_bytes"] < 4 << 20
    model, optimizer = strata.wrap(model, adamw(model), memory=memory, activations=None)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", ["added", "removed", "exchanged"])
def test_a_model_with_other_parameters_is_not_saved(tmp_path: Path, change: str) -> None:
    model: Any = linear_layers()
    model, _ = strata.wrap(model, adamw(model))
    if change == "added":
        model.append(nn.Linear(2, 2))
    elif change == "removed":
        del model[3]
    else:
        model[3][0].weight = nn.Parameter(torch.ones(256, 256))
    for save in (strata.save, strata.export_safetensors):
        with pytest.raises(RuntimeError, match=r"'[34].*added, removed or exchanged"):
            save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_with_what_it_has_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_disk_bytes", lambda paths: 1 << 20)
    model = linear_layers()
    memory = {"device": "1MiB", "host": "2MiB"}
    with pytest.raises(strata.StrataError, match=r"would do.*\(.*: 1\.0 MiB free\)"):
        strata.wrap(model, adamw(model), memory=memory, ssd_path=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start", ["wrap", "plan", "wrap without pages there"])
def test_what_a_killed_process_left_is_removed_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start: str
) -> None:
    """On file systems whose files all have names."""
    left = tmp_path / "strata-0123456789abcdef.pages"
    left.write_bytes(bytes(1 << 20))
    mine = tmp_path / "letter.pages"
    mine.write_bytes(b"dear")
    (tmp_path / "strata.lock").write_text(f"999999999 pid:[1]\n{left.name}\n{mine.name}\n")
    model = linear_layers()
    memory = TIGHT_SSD if start == "wrap" else {"device": "64MiB", "host": "64MiB", "ssd": "64MiB"}
    function = strata.plan if start == "plan" else strata.wrap
    with caplog.at_level(logging.WARNING, "strata"):
        function(model, adamw(model), memory=memory, ssd_path=tmp_path)
    assert f"removed {left} (1.00 MiB), which process 999999999 left" in caplog.text
    assert not left.exists()
    assert mine.exists()
