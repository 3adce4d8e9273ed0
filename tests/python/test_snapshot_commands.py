"""strata snapshots ls, copy and rm: of series, Trainers' outputs and drives."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._cli import main as cli
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots import pages
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.pages import slots_of
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
    assert "cannot read" in capsys.readouterr().err
    again = Case(disk, HOST, llama())
    strata.load(again.model, tmp_path / "copy")
    again.close()


@pytest.mark.parametrize("words", [["rm", "{c}"], ["copy", "{c}", "{to}"]])
def test_a_checkpoint_is_told_from_a_damaged_snapshot(
    words: list[str], tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(disk, SSD, llama())
    strata.save(case.model, tmp_path / "c")
    case.close()
    given = [word.format(c=tmp_path / "c", to=tmp_path / "to") for word in words]
    assert cli.main(["snapshots", *given]) == 1
    assert "is a checkpoint of strata.save, and no snapshot" in capsys.readouterr().err
    assert (tmp_path / "c" / "manifest.json").is_file()


def test_the_command_line_finds_what_there_is(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = drive(tmp_path, "second")
    model, _ = strata.wrap(
        model := llama(), torch.optim.AdamW(model.parameters()), memory=SSD, ssd_path=[disk, other]
    )

    def told(*words: Any) -> tuple[int, str]:
        status = cli.main(["snapshots", *map(str, words)])
        return status, "".join(capsys.readouterr())

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
    status, said = told("ls", trained)
    assert (status, "is missing" in said) == (1, True)
    status, said = told("rm", kept)
    assert status == 0
    assert f"{other} is not there" in said
    assert links(disk) == []
    (tmp_path / "unplugged").rename(other)
    assert "removed what" in told("rm", "--lost", other)[1]
    assert links(other) == []
    assert "keeps nothing for snapshots that were removed" in told("rm", "--lost", other)[1]
    assert told("rm", "--lost", tmp_path / "nope") == (1, f"strata: {tmp_path}/nope is no folder\n")
    with pytest.raises(SystemExit):
        told("rm")
    again = Case(disk, HOST, llama())
    for path in ("copy", "newest"):
        strata.load(again.model, tmp_path / path)
    again.close()


def test_relative_paths_are_as_good(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(Path(disk.name), SSD, llama())
    for _ in range(3):
        case.train(1)
        strata.snapshot(case.model, "runs/linear", keep=3).wait()
    assert len(links(disk)) == 6
    assert cli.main(["snapshots", "rm", "runs/linear/step-000001"]) == 0
    assert len(links(disk)) == 4
    assert cli.main(["snapshots", "copy", "runs/linear", "copy"]) == 0
    monkeypatch.chdir(tmp_path / "runs")
    assert cli.main(["snapshots", "rm", "linear/step-000002"]) == 0
    assert len(links(disk)) == 2
    case.train(1)
    strata.snapshot(case.model, "linear", keep=1).wait()
    assert sorted(p.name for p in (tmp_path / "runs/linear").iterdir()) == ["step-000004"]
    assert len(links(disk)) == 2
    monkeypatch.chdir(tmp_path)
    assert cli.main(["snapshots", "ls", disk.name]) == 0
    assert "it is not there" not in capsys.readouterr().out
    strata.load(case.model, "copy")
    case.close()


def test_a_copy_is_whole_or_says_why_not(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run", keep=1).wait()
    write, copied = pages._write_all, 0

    def slow(*rest: Any) -> None:
        nonlocal copied
        copied += 1
        if copied == 3:  # of a large one, which takes long
            for _ in range(3):
                case.train(1)
                strata.snapshot(case.model, tmp_path / "run", keep=1).wait()
        write(*rest)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "_write_all", slow)
        assert cli.main(["snapshots", "copy", str(folder), str(tmp_path / "copy")]) == 1
    assert "was removed while it was copied" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
    folder = strata.snapshot(case.model, tmp_path / "run", keep=1).wait()
    manifest = read_manifest(folder)
    with open(next((disk / LINKS).glob("*.pages")), "r+b") as file:
        file.seek(slots_of(manifest)[0][0] * manifest["page_bytes"] + 7)
        file.write(b"\x55")
    assert cli.main(["snapshots", "copy", str(folder), str(tmp_path / "copy")]) == 1
    assert "checksum" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
    case.close()


def test_a_sound_checkpoint_is_not_called_damaged(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(disk, SSD, llama())
    strata.save(case.model, tmp_path / "step-000001")
    case.close()
    for place in (tmp_path / "step-000001", tmp_path):
        cli.main(["snapshots", "ls", str(place)])
        said = "".join(capsys.readouterr())
        assert "a checkpoint of strata.save, and no snapshot" in said
        assert "damaged" not in said
    (tmp_path / "step-000001" / "manifest.json").write_text("{}")
    assert cli.main(["snapshots", "ls", str(tmp_path / "step-000001")]) == 1
    assert "damaged" in capsys.readouterr().out
