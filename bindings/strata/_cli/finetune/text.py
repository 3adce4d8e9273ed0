"""Finds text in files and folders, sets part of it aside, and turns it to tokens and batches, in an
order that the seed alone decides.

    documents = find_documents(["notes/", "book.txt"])
    training, held_out = split(documents, fraction=0.05, seed=0)
    tokenizer = train_tokenizer((d.text for d in training), vocabulary=8192)
    tokens = tokenize(tokenizer, training, Path("run/data/training.bin"))
    windows = Windows(tokens, sequence=512, seed=0)
    batch = windows.batch(position=0, count=4)      # int64, shape (4, 512)

A document is a file that reads as UTF-8. Folders are searched recursively; hidden files and what is
not text are passed over.
"""

import codecs
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..._errors import listed

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages"})


class DataError(ValueError):
    """The data cannot be used. The message names the files."""


@dataclass(frozen=True)
class Document:
    """A text, and where it came from."""

    name: str
    text: str


def find_documents(
    paths: Iterable[str | Path], limit: int | None = None, seed: int = 0
) -> list[Document]:
    """The documents under `paths` in the order of their names; where they hold more than `limit`
    bytes, some of them, chosen by `seed`.

    Raises FileNotFoundError for a path that is not there, and DataError where a file that was named
    itself is not text or where nothing remains.
    """
    places = [Path(path) for path in paths]
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"no data at {place}")
    files = [file for place in places for file in _files(place)]
    if limit is not None:
        random.Random(seed).shuffle(files)
    documents: list[Document] = []
    refused: list[str] = []
    left = limit
    for file in files:
        if left is not None and left <= 0:
            break
        text, problem = _read(file, left)
        if not problem:
            documents.append(Document(str(file), text))
            left = None if left is None else left - len(text.encode())
        elif file in places:
            raise DataError(f"{file} {problem}")
        else:
            refused.append(f"{file} ({problem})")
    if not documents:
        found = listed(refused) or "no files"
        raise DataError(f"no text in {', '.join(map(str, places))}; found {found}")
    return sorted(documents, key=lambda document: document.name)


def split(
    documents: list[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Training documents, and about `fraction` of the text held out, the same for the same seed.

    A single document is cut in two at the end of a line.
    """
    if len(documents) == 1:
        return _cut(documents[0], fraction)
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    wanted = fraction * sum(len(document.text) for document in documents)
    held_out: set[int] = set()
    size = 0
    for place in order[:-1]:  # one is always left to train on
        if size >= wanted and held_out:
            break
        # A large document would eat far more than its share.
        if not held_out or size + len(documents[place].text) <= 2 * wanted:
            held_out.add(place)
            size += len(documents[place].text)
    return (
        [d for place, d in enumerate(documents) if place not in held_out],
        [d for place, d in enumerate(documents) if place in held_out],
    )


def _cut(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    middle = round(len(document.text) * (1 - fraction))
    middle = document.text.rfind("\n", 0, middle) + 1 or middle
    return (
        [Document(document.name, document.text[:middle])],
        [Document(f"{document.name} (end)", document.text[middle:])],
    )


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and name[0] != "."
        )
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.is_file():
                yield file


def _read(file: Path, limit: int | None) -> tuple[str, str]:
    """At most `limit` bytes of text, or why there is none."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(-1 if limit is None else limit)
            cut = bool(opened.read(1))
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    if b"\0" in content[:8192]:
        return "", "is not text"
    try:
        # A limit may cut the last character in two; the decoder then waits for the rest of it.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=not cut)
    except UnicodeDecodeError:
        return "", "is not text in UTF-8"
    return (text, "") if text.strip() else ("", "is empty")


END = "<|endoftext|>"
ENCODED_TOGETHER = 64  # documents given to the tokenizer at once
TRAINING_CHARACTERS_MAX = 32_000_000  # more text changes a small vocabulary little


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, as Transformers wraps them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAINING_CHARACTERS_MAX), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def tokenize(tokenizer: Any, documents: list[Document], path: Path) -> np.ndarray[Any, Any]:
    """The tokens of all documents, each ended by the end-of-text token, as a file mapped at `path`.

    The tokens rest in the file, so their memory is the page cache's.
    """
    end = tokenizer.eos_token_id
    with open(path, "wb") as file:
        for begin in range(0, len(documents), ENCODED_TOGETHER):
            texts = [d.text for d in documents[begin : begin + ENCODED_TOGETHER]]
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                np.array([*ids, *([] if end is None else [end])], dtype=np.uint32).tofile(file)
    return np.memmap(path, dtype=np.uint32, mode="r")


class Windows:
    """Tokens cut into windows of equal length, drawn without repetition, epoch after epoch.

    A position counts the windows drawn so far: it is all a run needs to continue.
    """

    def __init__(self, tokens: np.ndarray[Any, Any], sequence: int, seed: int) -> None:
        """Raises DataError for less than one window."""
        self.count = len(tokens) // sequence
        if self.count == 0:
            raise DataError(
                f"the text has {len(tokens)} tokens, less than one sequence of {sequence}"
            )
        self.sequence = sequence
        self._tokens = tokens[: self.count * sequence].reshape(self.count, sequence)
        self._seed = seed
        self._epoch = -1
        self._order = np.arange(self.count)

    def batch(self, position: int, count: int) -> torch.Tensor:
        """The windows from `position` on, as int64 of shape (count, sequence)."""
        rows = [self._tokens[self._place(position + i)] for i in range(count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _place(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return int(self._order[place])


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts up to about so many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
