"""From the options to batches: text, tokenizer, tokens and windows of one run.

    with prepare(options, choice, output) as data:
        batch = data.training.batch(position=0, count=4)
        data.keep()

The tokens and a trained tokenizer rest in the output folder; a resumed run takes them from there,
so that it sees the very same text. Until keep() they are in a work folder (replacing.py), so that
a run which is refused takes nothing away from an earlier one.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoTokenizer

from .._config.sizes import parse_size
from .._storage.replacing import WorkFolder, dead_folders, remove
from .finetune_model import Choice
from .finetune_options import Options
from .finetune_text import Document, find_documents, split
from .finetune_tokens import Windows, tokenize, train_tokenizer

DATA_NAME, TOKENIZER_NAME = "data", "tokenizer"  # folders in the output
READY_NAME = "ready.json"  # written last: the folder is then complete
TOKEN_NAMES = ("training.bin", "held_out.bin")
TOKENIZER_FILES = (  # as save_pretrained calls them
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
TARGET = "tokens"
PROMPT_CHARACTERS = 200


@dataclass(frozen=True)
class Data:
    """What a run reads. `prompt` is the beginning of a held-out document. keep() gives its files
    their places in the output."""

    tokenizer: Any
    training: Windows
    held_out: Windows
    fingerprint: str
    prompt: str
    documents: int
    keep: Callable[[], None]


@contextlib.contextmanager
def prepare(options: Options, choice: Choice, output: Path) -> Iterator[Data]:
    """Finds the text and turns it into tokens. Raises DataError where there is too little of it."""
    folder = output / DATA_NAME
    if options.resume and (folder / READY_NAME).is_file():
        yield _read(options, choice, folder, output / TOKENIZER_NAME, lambda: None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for left in dead_folders(folder, TARGET):
        remove(left)
    with WorkFolder(folder, TARGET) as work:
        try:
            tokenizer = work.path / TOKENIZER_NAME
            _tokenize_all(options, choice, tokenizer, work.path)
            yield _read(options, choice, work.path, tokenizer, lambda: _place(work.path, output))
        finally:
            remove(work.path)
            with contextlib.suppress(OSError):  # of a run that was refused
                folder.rmdir()


def _place(work: Path, output: Path) -> None:
    """Moves tokens, and copies a tokenizer, whose folder may be on another disk."""
    folder, tokenizer = output / DATA_NAME, output / TOKENIZER_NAME
    (folder / READY_NAME).unlink(missing_ok=True)
    if (work / TOKENIZER_NAME).is_dir():
        tokenizer.mkdir(exist_ok=True)
        for file in (work / TOKENIZER_NAME).iterdir():
            shutil.copyfile(file, tokenizer / file.name)
    for name in (*TOKEN_NAMES, READY_NAME):
        os.replace(work / name, folder / name)
    remove(work)


def _read(
    options: Options, choice: Choice, folder: Path, tokenizer: Path, keep: Callable[[], None]
) -> Data:
    ready = json.loads((folder / READY_NAME).read_text())
    training, held_out = (_windows(folder / name, options) for name in TOKEN_NAMES)
    return Data(
        tokenizer=choice.load_tokenizer() or AutoTokenizer.from_pretrained(tokenizer),
        training=training,
        held_out=held_out,
        fingerprint=ready["fingerprint"],
        prompt=ready["prompt"],
        documents=ready["documents"],
        keep=keep,
    )


def _tokenize_all(options: Options, choice: Choice, trained: Path, folder: Path) -> None:
    """`trained`: where a tokenizer goes that has to be trained."""
    limit = None if options.data_limit is None else parse_size(options.data_limit)
    documents = find_documents(options.data, limit, options.seed)
    training, held_out = split(documents, options.held_out, options.seed)
    tokenizer = choice.load_tokenizer()
    if tokenizer is None:
        tokenizer = train_tokenizer((d.text for d in training), choice.config.vocab_size)
        tokenizer.save_pretrained(trained)
    if len(tokenizer) > choice.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {choice.tokenizer} has {len(tokenizer)} tokens, the model's "
            f"vocabulary {choice.config.vocab_size}"
        )
    digest = xxhash.xxh3_64()
    for name, part in zip(TOKEN_NAMES, (training, held_out), strict=True):
        digest.update(tokenize(tokenizer, part, folder / name).data)
    ready = {
        "fingerprint": digest.hexdigest(),
        "documents": len(documents),
        "prompt": _prompt(held_out[0]),
    }
    (folder / READY_NAME).write_text(json.dumps(ready))


def _windows(path: Path, options: Options) -> Windows:
    return Windows(np.memmap(path, dtype=np.uint32, mode="r"), options.sequence, options.seed)


def _prompt(document: Document) -> str:
    """The first lines of a document, up to the end of a word."""
    text = document.text.lstrip()[:PROMPT_CHARACTERS]
    end = max(text.rfind("\n"), text.rfind(" "))
    return text[:end] if end > 0 else text
