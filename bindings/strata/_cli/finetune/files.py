"""Files of a run: the tokens that it reads, and what an earlier run left in the output folder.

    claim(output, options)         # refuses, and removes nothing
    with prepare(options, choice, output) as data:
        remove_earlier(output)     # the new run is accepted
        batch = data.training.batch(position=0, count=4)
        data.keep()

The tokens and a trained tokenizer rest in the output folder; a resumed run takes them from there,
so that it sees the very same text. Until keep() they are in a work folder (replacing.py), so that
a run which is refused takes nothing away from an earlier one. Only files that a run writes are
removed: by their names, and where they carry a mark, by that.
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

from ..._config.sizes import parse_size
from ..._storage.checkpoint_files import check_replaceable, foreign_files, remove_checkpoint
from ..._storage.export import refuse_others, remove_export
from ..._storage.replacing import WorkFolder, dead_folders, remove
from ..models import Choice
from .options import OPTIONS_NAME, Options
from .text import Document, Windows, find_documents, split, tokenize, train_tokenizer

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


CHECKPOINT_NAME, MODEL_NAME = "checkpoint", "model"
RUN_FOLDERS = (CHECKPOINT_NAME, DATA_NAME, TOKENIZER_NAME, MODEL_NAME)


def claim(output: Path, options: Options) -> None:
    """Makes the output folder. Raises ValueError, FileExistsError or CheckpointError where the run
    would take the place of an earlier one unasked, or of files that no run wrote."""
    if not options.resume:
        if (output / OPTIONS_NAME).exists():
            _check_overwriting(output, options)
        else:
            check_replaceable(output / CHECKPOINT_NAME)
    refuse_others(output / MODEL_NAME, TOKENIZER_FILES)  # at the end it would be too late
    output.mkdir(parents=True, exist_ok=True)


def remove_earlier(output: Path) -> None:
    """Removes what an earlier run wrote and the new one would not replace before its end.

    The checkpoint goes first: killed in between, nothing can be resumed with the wrong text. The
    options stay, as the mark of a run, until those of the new one take their place; so do the
    tokens.
    """
    if not (output / OPTIONS_NAME).exists():
        return
    remove_checkpoint(output / CHECKPOINT_NAME)
    remove_export(output / MODEL_NAME, TOKENIZER_FILES)
    for name in TOKENIZER_FILES:
        (output / TOKENIZER_NAME / name).unlink(missing_ok=True)


def _check_overwriting(output: Path, options: Options) -> None:
    if not options.overwrite:
        raise ValueError(
            f"{output} holds an earlier run: --resume continues it, --overwrite replaces it"
        )
    folders = [(output / name).resolve() for name in RUN_FOLDERS]
    for read in (options.model, *options.data):
        if any(Path(read).resolve().is_relative_to(folder) for folder in folders):
            raise ValueError(
                f"--overwrite would remove {read}, which the new run reads: give another --output"
            )
    if foreign := foreign_files(output / CHECKPOINT_NAME):  # a checkpoint takes the folder's place
        raise ValueError(
            f"{foreign[0]} is not a file of the earlier run: move it away, or give another --output"
        )
