"""Text to tokens to batches, in an order that the seed alone decides.

tokenizer = train_tokenizer(texts, vocabulary=8192)
tokens = tokenize(tokenizer, documents, Path("run/data/training.bin"))
windows = Windows(tokens, sequence=512, seed=0)
batch = windows.batch(position, count=4)        # int64, shape (4, 512)
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .finetune_text import DataError, Document

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

    The tokens rest in the file, so their memory is the page cache's. An existing file is replaced.
    """
    end = tokenizer.eos_token_id
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for begin in range(0, len(documents), ENCODED_TOGETHER):
            texts = [d.text for d in documents[begin : begin + ENCODED_TOGETHER]]
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                np.array([*ids, *([] if end is None else [end])], dtype=np.uint32).tofile(file)
    os.replace(temporary, path)
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
