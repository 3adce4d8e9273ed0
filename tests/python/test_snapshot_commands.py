"""strata snapshots ls, copy and rm: of series, Trainers' outputs and drives."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._cli import main as cli
from test_checkpoint import Case, llama
from test_snapshot import HOST, SSD, disk, drive, links

__all__ = ["disk"]  # a fixture


def test_the_command_line_looks_after_all_drives(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = drive(tmp_path, "second")
    model, _ = strata.wrap(
        model := llama(), torch.optim.AdamW(model.parameters()), memory=SSD, ssd_path=[disk, other]
    )
    run = tmp_path / "run"
    folder = strata.snapshot(model, run).wait()
    strata.unwrap(model)
    assert cli.main(["snapshots", "ls", str(run)]) == 0
    assert "step-000000" in (shown := capsys.readouterr().out)
    assert str(disk) in shown
    assert cli.main(["snapshots", "copy", str(folder), str(tmp_path / "copy")]) == 0
    assert cli.main(["snapshots", "rm", str(folder)]) == 0
    assert links(disk) == links(other) == []
    assert cli.main(["snapshots", "ls", str(run)]) == 1
    assert cli.main(["snapshots", "rm", str(folder)]) == 1
    assert "cannot read" in capsys.readouterr().out
    again = Case(disk, HOST, llama())
    strata.load(again.model, tmp_path / "copy")
    again.close()


def test_the_command_line_finds_what_there_is(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = drive(tmp_path, "second")
    model, _ = strata.wrap(
        model := llama(), torch.optim.AdamW(model.parameters()), memory=SSD, ssd_path=[disk, other]
    )

    def told(*words: Any) -> tuple[int, str]:
        return cli.main(["snapshots", *map(str, words)]), capsys.readouterr().out

    trained = tmp_path / "trainer" / "checkpoint-4" / "strata"
    kept, gone, moved = (
        strata.snapshot(model, path).wait() for path in (trained, tmp_path / "a", tmp_path / "b")
    )
    strata.unwrap(model)
    assert told("ls", tmp_path / "trainer")[1].startswith("checkpoint-4/strata/step-000000  ")
    assert told("ls", kept) == (0, told("ls", trained)[1].replace("step-000000", str(kept), 1))
    status, said = told("rm", tmp_path / "a")
    assert (status, "holds 1: name them" in said) == (1, True)
    assert gone.is_dir()
    # What a user does who knows nothing of links.
    shutil.rmtree(tmp_path / "a")
    shutil.move(moved, tmp_path / "elsewhere")
    status, said = told("ls", other)
    assert status == 0
    assert said.count("it is not there: removed, or moved") == 2
    assert f"strata snapshots rm --lost {other}" in said
    assert told("copy", tmp_path / "elsewhere", tmp_path / "copy")[0] == 0
    assert told("copy", tmp_path / "trainer/checkpoint-4/strata", tmp_path / "newest")[0] == 0
    status, said = told("rm", "--lost", disk, other)
    assert (status, said.count("removed what")) == (0, 4)
    assert len(links(disk)) == len(links(other)) == 2, "the one that is there keeps its own"
    other.rename(tmp_path / "unplugged")
    assert "is missing" in told("ls", trained)[1]
    status, said = told("rm", kept)
    assert status == 0
    assert f"{other} is not there" in said
    assert links(disk) == []
    (tmp_path / "unplugged").rename(other)
    assert "removed what" in told("rm", "--lost", other)[1]
    assert links(other) == []
    assert told("rm")[0] == 1
    again = Case(disk, HOST, llama())
    for path in ("copy", "newest"):
        strata.load(again.model, tmp_path / path)
    again.close()
