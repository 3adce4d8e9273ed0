"""What becomes of an earlier run's files, and a step that runs out of memory is run again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import arguments, lines, wrong
from strata._cli import main as cli
from strata._cli.finetune import run as finetune
from strata._cli.finetune.text import Windows
from strata._storage import checkpoint_files
from strata._torch_compat import graph_task
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


@pytest.mark.parametrize("update", ["on_step", "in_backward"])
def test_a_recorded_step_without_memory_is_run_again_and_takes_less(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], update: str
) -> None:
    """But not where its backward has updated parameters."""
    plain, failures = LlamaMLP.forward, [torch.OutOfMemoryError("no room")]
    positions: dict[int, list[int]] = {}  # of the training windows, and of those held out

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if graph_task() != -1 and failures:
            raise failures.pop()
        return plain(self, x)

    def batch(self: Any, position: int, count: int) -> torch.Tensor:
        positions.setdefault(id(self), []).append(position)
        return plain_batch(self, position, count)

    plain_batch = Windows.batch
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(Windows, "batch", batch)
    status = cli.main(arguments(place, steps=2, accumulation=1, update=update))
    assert not failures
    if update == "in_backward":
        assert status == 1
        assert "step 1 ran out of device memory: no room; in a step" in capsys.readouterr().err
        return
    assert status == 0
    assert [r["step"] for r in lines(place / "out") if "loss" in r] == [1, 2]
    assert [0, 0, 2] in positions.values()


@pytest.mark.parametrize("what", ["model", "data"])
def test_overwriting_a_run_does_not_remove_what_is_read(
    place: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / "out"
    mine = place / ("tiny" if what == "model" else "text")
    output.mkdir()
    (output / "options.json").write_text("{}")
    shutil.copytree(mine, output / what)
    read = output / what / "config.json" if what == "model" else output / what
    said = wrong(capsys, [*arguments(place, **{what: read}), "--overwrite"])
    assert "--overwrite would remove" in said
    assert {p.name for p in (output / what).iterdir()} == {p.name for p in mine.iterdir()}


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_run_that_is_refused_leaves_the_earlier_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(place, steps=2, **{"save-every": 1})) == 0
    out = place / "out"
    (out / "data" / "my-own-notes.txt").write_text("mine")
    before = files_in(out)
    capsys.readouterr()
    other = {"vocabulary": 300, "seed": 1}
    for change, expected in (
        ({"device-memory": "256KiB", "batch": 16, "sequence": 128}, "the device budget is"),
        ({"device": "cuda:99"}, "cuda"),
        ({"data": "/nowhere"}, "no data"),
        ({"sequence": 100_000, "device-memory": None}, "less than one sequence"),
        ({"update": "in_backward"}, "'on_step' with gradient_accumulation_steps"),  # by wrap()
    ):
        said = wrong(capsys, [*arguments(place, **(other | change)), "--overwrite"])
        assert expected in said
        assert files_in(out) == before

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(finetune, "_wrap", interrupt)
        assert cli.main([*arguments(place, **other), "--overwrite"]) == 130
    assert files_in(out) == before
    assert cli.main(["finetune", "--resume", f"--output={out}", "--steps=3"]) == 0


def test_overwriting_keeps_what_no_run_wrote(place: Path) -> None:
    out, elsewhere = place / "out", place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "letter.txt").write_text("mine")
    assert cli.main(arguments(place, steps=2, **{"save-every": 1})) == 0
    (out / "data" / "linked").symlink_to(elsewhere)
    shutil.move(out / "model", place / "moved")
    (out / "model").symlink_to(place / "moved")
    for folder in ("data", "model", "tokenizer", "."):
        (out / folder / "my-own-notes.txt").write_text("mine")
    # What a killed process left of another checkpoint, which loaders would take for the run's.
    left = out / "checkpoint.strata-left"
    (left / "new").mkdir(parents=True)
    shutil.copy(out / "checkpoint" / "manifest.json", left / "new")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    marker = {"strata": "work folder", "target": "checkpoint", "boot": boot}
    (left / "strata-work.json").write_text(json.dumps(marker))

    assert cli.main([*arguments(place, steps=1, **{"eval-every": 0}), "--overwrite"]) == 0
    for folder in ("data", "model", "tokenizer", "."):
        assert (out / folder / "my-own-notes.txt").read_text() == "mine"
    assert (out / "data" / "linked" / "letter.txt").read_text() == "mine"
    assert checkpoint_files.find(out / "checkpoint") is None
    assert [r["step"] for r in lines(out) if "loss" in r] == [1]
    assert (out / "model").is_symlink()
    AutoModelForCausalLM.from_pretrained(out / "model")


@pytest.mark.parametrize(
    "mine", ["checkpoint/notes.txt", "model/model.safetensors", "model/tokenizer.json"]
)
def test_overwriting_is_refused_where_files_of_others_are_in_the_way(
    place: Path, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    out = place / "out"
    for name in ("options.json", "checkpoint/state.bin", "data/my-own-notes.txt", mine):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    before = files_in(out)
    said = wrong(capsys, [*arguments(place), "--overwrite"])
    assert f"{out / mine} " in said
    assert "move it away" in said
    assert files_in(out) == before
