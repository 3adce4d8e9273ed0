"""From the options to batches: text, tokenizer, tokens and windows of one run.

    data = prepare(options, choice, output)
    batch = data.training.batch(position=0, count=4)

The tokens and a trained tokenizer rest in the output folder; a resumed run takes them from there,
so that it sees the very same text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoTokenizer

from .finetune_model import Choice
from .finetune_options import Options
from .finetune_text import Document, find_documents, split
from .finetune_tokens import Windows, tokenize, train_tokenizer
from .sizes import parse_size

READY_NAME = "ready.json"  # written last: the folder is then complete
PROMPT_CHARACTERS = 200


@dataclass(frozen=True)
class Data:
    """What a run reads. `prompt` is the beginning of a held-out document."""

    tokenizer: Any
    training: Windows
    held_out: Windows
    fingerprint: str
    prompt: str
    documents: int


def prepare(options: Options, choice: Choice, output: Path) -> Data:
    """Finds the text and turns it into tokens. Raises DataError where there is too little of it."""
    folder = output / "data"
    if not (options.resume and (folder / READY_NAME).is_file()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY_NAME).unlink(missing_ok=True)
        _tokenize_all(options, choice, output, folder)
    ready = json.loads((folder / READY_NAME).read_text())
    own = choice.load_tokenizer()
    return Data(
        tokenizer=own or AutoTokenizer.from_pretrained(output / "tokenizer"),
        training=_windows(folder / "training.bin", options),
        held_out=_windows(folder / "held_out.bin", options),
        fingerprint=ready["fingerprint"],
        prompt=ready["prompt"],
        documents=ready["documents"],
    )


def _tokenize_all(options: Options, choice: Choice, output: Path, folder: Path) -> None:
    limit = None if options.data_limit is None else parse_size(options.data_limit)
    documents = find_documents(options.data, limit, options.seed)
    training, held_out = split(documents, options.held_out, options.seed)
    tokenizer = choice.load_tokenizer()
    if tokenizer is None:
        tokenizer = train_tokenizer((d.text for d in training), choice.config.vocab_size)
        tokenizer.save_pretrained(output / "tokenizer")
    if len(tokenizer) > choice.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {choice.tokenizer} has {len(tokenizer)} tokens, the model's "
            f"vocabulary {choice.config.vocab_size}"
        )
    digest = xxhash.xxh3_64()
    for name, part in (("training.bin", training), ("held_out.bin", held_out)):
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
