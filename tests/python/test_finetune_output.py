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
from strata._torch_compat import graph_task
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from variants import thorough


@pytest.mark.parametrize("update", ["on_step", thorough("in_backward")])
def test_a_recorded_step_without_memory_is_run_again_and_takes_less(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], update: str
) -> None:
    """With all of its batches, but not where its backward has updated parameters."""
    more = {"steps": 3, "accumulation": 2 if update == "on_step" else 1, "update": update}
    assert cli.main(arguments(place, "whole", **more)) == 0
    plain, backwards = LlamaMLP.forward, [0]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if graph_task() != -1:
            backwards[0] += 1
            if backwards[0] == (3 if update == "on_step" else 1):  # of the second batch
                raise torch.OutOfMemoryError("no room")
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    status = cli.main(arguments(place, **more))
    if update == "in_backward":
        assert status == 1
        assert "step 1 ran out of device memory: no room; in a step" in capsys.readouterr().err
        return
    assert backwards[0] > 3
    assert status == 0
    losses = [[r["loss"] for r in lines(place / f) if "loss" in r] for f in ("whole", "out")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("what", ["model", "data"])
def test_overwriting_a_run_does_not_remove_what_is_read(
    place: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / "out"
    mine = place / ("tiny" if what == "model" else "text")
    output.mkdir()
    (output / "options.yaml").write_text("{}")
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
        ({"sequence": 100_000, "device-memory": None}, "less than a batch"),
        ({"update": "in_backward"}, "'on_step' with gradient_accumulation_steps"),  # by wrap()
    ):
        said = wrong(capsys, [*arguments(place, **(other | change)), "--overwrite"])
        assert expected in said
        assert files_in(out) == before

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(finetune, "make_trainer", interrupt)
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
    # What a killed process left of a checkpoint.
    left = out / "checkpoint-2" / "strata.strata-left"
    left.mkdir()
    marker = {"strata": "work folder", "target": "strata", "boot": "", "host": "", "pid": 1}
    (left / "strata-work.json").write_text(json.dumps(marker))

    assert cli.main([*arguments(place, steps=1, **{"eval-every": 0}), "--overwrite"]) == 0
    for folder in ("data", "model", "tokenizer", "."):
        assert (out / folder / "my-own-notes.txt").read_text() == "mine"
    assert (out / "data" / "linked" / "letter.txt").read_text() == "mine"
    assert list(out.glob("checkpoint*")) == []
    assert [r["step"] for r in lines(out) if "loss" in r] == [1]
    assert (out / "model").is_symlink()
    AutoModelForCausalLM.from_pretrained(out / "model")


@pytest.mark.parametrize(
    "mine", ["checkpoint-1/notes.txt", "model/model.safetensors", "model/tokenizer.json"]
)
def test_overwriting_is_refused_where_files_of_others_are_in_the_way(
    place: Path, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    out = place / "out"
    for name in ("options.yaml", "checkpoint-1/scheduler.pt", "data/my-own-notes.txt", mine):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    before = files_in(out)
    said = wrong(capsys, [*arguments(place), "--overwrite"])
    assert f"{out / mine} " in said
    assert "move it away" in said
    assert files_in(out) == before
