"""A checkpoint folder is whole or absent, whatever happens to the process that writes it."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from strata import checkpoint_files as files

PIECES = 3
PIECE_BYTES = 1000


def put(path: Path, generation: int) -> None:
    """Writes a checkpoint whose every byte says which generation it is of."""
    piece = memoryview(bytes([generation]) * PIECE_BYTES)
    with files.replace_folder(path) as folder:
        with files.TensorWriter(folder / files.STATE_NAME) as state:
            records = [state.append("master", "uint8", [piece] * PIECES) for _ in range(2)]
        files.write_manifest(folder, {"bytes": state.bytes, "of": generation, "tensors": records})


def get(path: Path) -> int:
    """Reads a checkpoint, checks every byte of it, and returns its generation."""
    found = files.find(path)
    assert found is not None
    with files.TensorReader(found, buffer_bytes=700) as state:
        records = state.manifest["tensors"]
        state.verify((("some", record) for record in records), lambda count: None)
        for record in records:
            content = b"".join(bytes(chunk) for chunk in state.chunks(record))
            assert content == bytes([state.manifest["of"]]) * (PIECES * PIECE_BYTES)
        return state.manifest["of"]


def survives(work: Callable[[], None], operation: int) -> bool:
    """Runs `work` in a child that is killed before its nth file operation. True: it got by."""
    child = os.fork()
    if child == 0:
        left = operation

        def count(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)


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
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "leftovers of dead savers remain"


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
    state = tmp_path / "run" / files.STATE_NAME
    content = bytearray(state.read_bytes())
    content[place] ^= 4
    state.write_bytes(content)
    with pytest.raises(files.CheckpointError, match=r"master of 'some' .* is damaged"):
        get(tmp_path / "run")


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "run", 1)
    os.truncate(tmp_path / "run" / files.STATE_NAME, 17)
    with pytest.raises(files.CheckpointError, match="has 17 bytes"):
        get(tmp_path / "run")


def test_a_damaged_or_foreign_manifest_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "run", 1)
    manifest = tmp_path / "run" / files.MANIFEST_NAME
    text = manifest.read_text()
    manifest.write_text(text.replace('"of": 1', '"of": 2'))
    with pytest.raises(files.CheckpointError, match="does not match"):
        get(tmp_path / "run")
    manifest.write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(files.CheckpointError, match="of version 9"):
        get(tmp_path / "run")
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(files.CheckpointError, match="cannot read"):
        get(tmp_path / "run")
