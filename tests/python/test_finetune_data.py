"""Text is found, set aside, turned into tokens and drawn in an order that the seed decides."""

from pathlib import Path

import numpy as np
import pytest
from strata._cli.finetune.text import (
    END,
    DataError,
    Document,
    Windows,
    find_documents,
    split,
    tokenize,
    train_tokenizer,
)

TEXT = "The cat sat on the mat.\nThe dog sat on the log.\n" * 20


def write(folder: Path, **files: bytes | str) -> Path:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
    return folder


def test_folders_are_searched_and_what_is_not_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "deep" / "er", note="in the depth")
    write(tmp_path / ".hidden", secret="never read")
    write(tmp_path, b="second\n", a="first", picture=b"\x89PNG\0\1", empty="", latin=b"\xe9t\xe9")
    names = [Path(d.name).name for d in find_documents([tmp_path])]
    assert names == ["a", "b", "note"]


def test_nothing_but_other_files_is_an_error_that_names_them(tmp_path: Path) -> None:
    write(tmp_path, picture=b"\x89PNG\0\1", empty=" \n", latin=b"\xe9t\xe9")
    with pytest.raises(DataError) as caught:
        find_documents([tmp_path])
    for expected in ("picture (is not text)", "empty (is empty)", "latin (is not text in UTF-8)"):
        assert expected in str(caught.value)
    with pytest.raises(DataError, match="picture is not text"):
        find_documents([tmp_path / "picture"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_documents([tmp_path / "nowhere"])


def test_a_limit_counts_bytes_and_cuts_no_character(tmp_path: Path) -> None:
    write(tmp_path, a="é" * 100)
    (document,) = find_documents([tmp_path], limit=51)
    assert document.text == "é" * 25
    write(tmp_path, **{f"f{i}": "x" * 50 for i in range(10)})
    some = find_documents([tmp_path], limit=120, seed=1)
    assert sum(len(d.text.encode()) for d in some) <= 120
    assert some == find_documents([tmp_path], limit=120, seed=1)


def test_the_split_is_by_documents_and_seeded() -> None:
    documents = [Document(str(i), "x" * 100) for i in range(40)]
    training, held_out = split(documents, 0.1, seed=0)
    assert len(held_out) == 4
    assert sorted(training + held_out, key=lambda d: int(d.name)) == documents
    assert split(documents, 0.1, seed=0) == (training, held_out)
    assert split(documents, 0.1, seed=1) != (training, held_out)


def test_one_document_is_cut_at_a_line() -> None:
    (training,), (held_out,) = split([Document("a", TEXT)], 0.25, seed=0)
    assert training.text + held_out.text == TEXT
    assert training.text.endswith("\n")
    assert 0.2 < len(held_out.text) / len(TEXT) < 0.3


def test_a_trained_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], vocabulary=300)
    assert len(tokenizer) <= 300
    strange = "naïve 日本 \t\n  two  spaces"
    documents = [Document("a", TEXT), Document("b", strange)]
    tokens = tokenize(tokenizer, documents, tmp_path / "tokens.bin")
    assert tokenizer.decode(tokens.tolist()) == TEXT + END + strange + END
    assert len(tokens) < len(TEXT) / 2


def test_windows_repeat_nothing_within_an_epoch_and_depend_on_the_position_alone() -> None:
    tokens = np.arange(103, dtype=np.uint32)
    windows = Windows(tokens, sequence=10, seed=5)
    epochs = [windows.batch(epoch * 10, 10) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(100))
    assert epochs[0].tolist() != epochs[1].tolist()
    again = Windows(tokens, sequence=10, seed=5)
    assert again.batch(7, 6).tolist() == windows.batch(7, 6).tolist()
    assert Windows(tokens, sequence=10, seed=6).batch(0, 10).tolist() != epochs[0].tolist()
    with pytest.raises(DataError, match="103 tokens, less than one sequence of 104"):
        Windows(tokens, sequence=104, seed=0)
