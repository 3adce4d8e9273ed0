"""A file or a folder for which there is no room is named, with what it takes."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._report import perfetto
from strata._storage import trace_file
from strata._storage.replacing import write_whole, writing

LIMIT = 512  # bytes of a file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    memory = {"device": "1MiB", "host": "4MiB"}
    model, optimizer = strata.wrap(made, torch.optim.AdamW(made.parameters()), memory=memory)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model
    strata.unwrap(model)


@pytest.fixture
def small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda model, path: strata.save(model, path),
    "export": lambda model, path: strata.export_safetensors(model, path),
    "report": lambda model, path: strata.report(model).save(path),
    "trace": lambda model, path: trace_file.save_trace(model, path),
    "perfetto": lambda model, path: perfetto.write(strata.report(model).records, path),
    "options": lambda model, path: write_whole(path, "x" * 1000),
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_writes_names_path_and_size(
    what: str, model: Any, tmp_path: Path, small_files: None
) -> None:
    with pytest.raises(OSError, match="File too large") as refused:
        WRITERS[what](model, tmp_path / "there")
    assert refused.value.errno == errno.EFBIG
    said = str(refused.value)
    assert str(tmp_path / "there") in said
    assert "it takes" in said
    assert "ulimit -f" in said


def test_errors_of_libraries_are_told_by_their_text(tmp_path: Path) -> None:
    class LibraryError(Exception):
        pass

    with pytest.raises(OSError, match="are free there") as refused, writing(tmp_path / "a", 4096):
        raise LibraryError("I/O error: No space left on device (os error 28)")
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))
    assert "it takes 4.0 KiB, and" in str(refused.value)
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        os.stat(tmp_path / "nowhere")
