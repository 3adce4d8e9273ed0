"""A checkpoint folder is whole or absent, whatever happens to the process that writes it."""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from killed import survives
from strata._config import machine
from strata._storage import checkpoint_files as files
from strata._storage import replacing
from strata._storage.saved_file import stream_file

PIECES = 3
PIECE_BYTES = 1000
NAME = files.shard_name("parameters", 1)


def put(path: Path, generation: int) -> None:
    """Writes a checkpoint whose every byte says which generation it is of."""
    piece = memoryview(bytes([generation]) * PIECE_BYTES)
    with files.replace_folder(path) as folder:
        with files.TensorWriter(folder / NAME) as file:
            records = [file.append("master", "uint8", [piece] * PIECES) for _ in range(2)]
        manifest = {"bytes": file.bytes, "of": generation}
        manifest["tensors"] = [record | {"file": NAME} for record in records]
        files.write_manifest(folder, manifest)


def get(path: Path) -> int:
    """Reads a checkpoint, checks every byte of it, and returns its generation."""
    found = files.find(path)
    assert found is not None
    manifest = files.read_manifest(found)
    with files.TensorReader(found, {NAME: manifest["bytes"]}, buffer_bytes=700) as file:
        records = manifest["tensors"]
        file.verify((("some", record) for record in records), lambda count: None)
        for record in records:
            content = b"".join(bytes(chunk) for chunk in file.chunks(record))
            assert content == bytes([manifest["of"]]) * (PIECES * PIECE_BYTES)
        return manifest["of"]


def test_a_checkpoint_is_complete_at_any_kill(tmp_path: Path) -> None:
    path = tmp_path / "run"
    put(path, 0)
    seen = 0
    for operation in range(1, 200):
        done = survives(lambda generation=operation: put(path, generation), operation)
        seen, before = get(path), seen
        assert seen in (before, operation)
        if done:
            assert seen == operation
            break
    else:
        pytest.fail("the child never got by")
    assert operation > 8, "the kills did not reach the middle of a save"
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "the last one removed what was left"


def test_the_first_save_is_absent_until_it_is_complete(tmp_path: Path) -> None:
    for operation in range(1, 6):
        path = tmp_path / str(operation)
        assert not survives(lambda path=path: put(path, 1), operation)
        assert files.find(path) is None


def test_an_exception_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    put(path, 1)
    with pytest.raises(KeyboardInterrupt), files.replace_folder(path):
        raise KeyboardInterrupt
    assert get(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(files.CheckpointError, match="not a checkpoint"):
        put(tmp_path, 1)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("place", [0, PIECES * PIECE_BYTES + 1])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, place: int) -> None:
    put(tmp_path / "run", 1)
    state = tmp_path / "run" / NAME
    content = bytearray(state.read_bytes())
    content[place] ^= 4
    state.write_bytes(content)
    with pytest.raises(files.CheckpointError, match=r"master of 'some' .* is damaged"):
        get(tmp_path / "run")


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "run", 1)
    os.truncate(tmp_path / "run" / NAME, 17)
    with pytest.raises(files.CheckpointError, match="has 17 bytes"):
        get(tmp_path / "run")


def test_a_damaged_or_foreign_manifest_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "run", 1)
    manifest = tmp_path / "run" / files.MANIFEST_NAME
    text = manifest.read_text()
    manifest.write_text(text.replace('"of": 1', '"of": 2'))
    with pytest.raises(files.CheckpointError, match="does not match"):
        get(tmp_path / "run")
    manifest.write_text(text.replace('"version": 2', '"version": 9'))
    with pytest.raises(files.CheckpointError, match="of version 9"):
        get(tmp_path / "run")
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(files.CheckpointError, match="cannot read"):
        get(tmp_path / "run")


def test_only_what_carries_our_mark_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    put(path, 1)
    mine = ["run.old-backup", "run.tmp-notes", "run.old-999999999", "run.strata-mine", "run.old"]
    for name in mine:
        put(tmp_path / "made", 7)
        (tmp_path / "made").rename(tmp_path / name)
    put(path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {"run", *mine}
    assert all(get(tmp_path / name) == 7 for name in mine)


def test_no_link_is_followed_to_write(tmp_path: Path) -> None:
    """Whatever somebody has put by the names of files that are written first, and of the last."""
    letter = tmp_path / "letter"
    letter.write_text("dear")
    writes: dict[str, Callable[[Path], None]] = {
        "whole": lambda path: replacing.write_whole(path, "{}"),
        "tensors": lambda path: stream_file({"x": torch.ones(2)}, path),
        "state": lambda path: files.TensorWriter(path).__exit__(None, None, None),
    }
    for name, write in writes.items():
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "file"
        for link in ("file", "file.tmp", f"file.{os.getpid()}", ".file.part"):
            (folder / link).symlink_to(letter)
        with contextlib.suppress(FileExistsError):
            write(path)
        assert letter.read_text() == "dear", name


def leftover(path: Path, change: dict[str, str], generation: int = 7) -> Path:
    """What a saver left that was killed between its renames, with another marker."""
    with replacing.WorkFolder(path.parent, path.name) as work:
        put(work.path / files.NEW_NAME, generation)
    marker = work.path / replacing.MARKER_NAME
    marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    return work.path


def test_leftovers_of_the_dead_go_and_of_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    dead = leftover(path, {})
    assert get(path) == 7, "the newest that is whole"
    elsewhere = leftover(path, {"boot": "another", "host": "node-2"})
    stranger = leftover(path, {"strata": "something else"})
    other = leftover(path, {"target": "run2"})
    with replacing.WorkFolder(path.parent, path.name) as living:
        with caplog.at_level(logging.WARNING, "strata"):
            put(path, 2)
        assert living.path.exists()
    assert get(path) == 2
    assert not dead.exists()
    assert elsewhere.exists()
    assert stranger.exists()
    assert other.exists()
    assert f"{elsewhere} was left by process" in caplog.text
    assert "node-2" in caplog.text
    put(path, 3)
    assert not living.path.exists()


def test_who_is_killed_before_it_marks_its_folder_leaves_nothing_for_long(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for name in ("run.strata-abcdefgh", "run.strata-01234567"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.strata-01234567" / f"{replacing.MARKER_NAME}.tmp").touch()
    mine = ["run.strata-notebook", "run.strata-abcdefghi", "run2.strata-abcdefgh"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / mine[0] / "notes").touch()
    put(path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["run", *mine])


def test_a_folder_that_is_taken_away_before_it_is_marked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, taken = replacing._mark, []

    def take_away_first(folder: Path, target: str) -> int:
        if len(taken) < 2:
            taken.append(folder)
            replacing.remove_unmarked(tmp_path, "run")
        return mark(folder, target)

    monkeypatch.setattr(replacing, "_mark", take_away_first)
    put(tmp_path / "run", 3)
    assert len(set(taken)) == 2
    assert get(tmp_path / "run") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_saver_with_the_same_number_is_no_obstacle(tmp_path: Path) -> None:
    """In a container it is always 1."""
    path = tmp_path / "run"
    put(path, 1)
    for name in ("tmp", "old"):
        left = tmp_path / f"run.{name}-{os.getpid()}"
        left.mkdir()
        (left / "something").write_text("x")
    for generation in (2, 3):
        put(path, generation)
        assert get(path) == generation


def test_a_link_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk" / "run")  # which is not there yet
    for generation in (1, 2):
        put(link, generation)
        assert link.is_symlink()
        assert get(link) == get(tmp_path / "disk" / "run") == generation
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["run"]
    assert [p.name for p in tmp_path.iterdir() if p.name != "disk"] == ["run"]


@pytest.mark.parametrize("what", ["file", "working directory", "mount", "bind mount"])
def test_what_cannot_be_replaced_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "the run"
    if what == "file":
        path.write_text("x")
    elif what == "working directory":
        path.mkdir()
        monkeypatch.chdir(path)
    elif what == "mount":
        path.mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda place: Path(place) == path)
    else:
        path.mkdir()
        place = str(path).replace(" ", "\\040")
        (tmp_path / "proc" / "self").mkdir(parents=True)
        mounts = tmp_path / "proc" / "self" / "mountinfo"
        mounts.write_text(f"36 35 98:0 /a {place} rw - ext4 /dev/root rw\n")
        monkeypatch.setattr(machine, "mounts", partial(machine.mounts, tmp_path))
    known = {"file": "is a file", "working directory": "the working directory"}
    message = known.get(what, f"mounted on.*such as {path / 'checkpoint'}")
    with (
        pytest.raises(files.CheckpointError, match=message),
        files.replace_folder(path),
    ):
        pytest.fail("so much is written for nothing")
    monkeypatch.undo()
    if what != "file":
        put(path / "checkpoint", 1)
        assert get(path / "checkpoint") == 1


def test_a_folder_that_only_looks_like_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "web"
    path.mkdir()
    (path / files.MANIFEST_NAME).write_text("{}")  # that of a web page
    (path / "index.html").write_text("x")
    with pytest.raises(files.CheckpointError, match="not a checkpoint"):
        put(path, 1)
    assert (path / "index.html").exists()


def test_files_beside_a_checkpoint_move_on_into_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run"
    put(path, 0)
    (path / "notes.txt").write_text("do not lose")
    (path / "logs").mkdir()
    (path / "logs" / "1").write_text("x")
    for operation in range(1, 200, 3):
        done = survives(lambda generation=operation: put(path, generation), operation)
        kept = [p for p in tmp_path.rglob("notes.txt") if p.read_text() == "do not lose"]
        assert len(kept) == 1
        if done:
            break
    put(path, 201)
    assert (path / "notes.txt").exists()
    assert (path / "logs" / "1").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_rename_undoes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: type[BaseException]
) -> None:
    path = tmp_path / "run"
    put(path, 1)
    rename, left = os.rename, failing

    def fail(source: Path, target: Path) -> None:
        nonlocal left
        if files.MANIFEST_NAME not in source.name and replacing.MARKER_NAME not in source.name:
            left -= 1
            if left == 0:
                raise error
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(error):
            put(path, 2)
    assert get(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"checksum": 1}', "[" * 100_000, "\xff", "9" * 5000])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    put(tmp_path / "run", 1)
    (tmp_path / "run" / files.MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(files.CheckpointError):
        get(tmp_path / "run")
