"""The data of a run: made from what --data names, and kept in the output folder.

    with prepare(options, choice, output, ranks) as data:
        data.training[0]["input_ids"]        # a window; all are mapped from a file
        data.keep()                          # the run is accepted

A resumed run takes windows and a trained tokenizer from the output folder, so that it sees the very
same ones; refuse_others() holds it against what it is told now. Until keep() they are in a work
folder (replacing.py), so that a run which is refused takes nothing away from an earlier one.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..._config.ranks import Ranks
from ..._config.sizes import parse_size
from ..._storage.replacing import WorkFolder, dead_folders, remove, writing
from ..models import Choice
from .encode import encoded, packed, template
from .files import DataError, find_sources, read_sources
from .options import Options
from .origin import ANEW, origin, refuse_other_data, refuse_other_model
from .ranks import led

DATA_NAME, TOKENIZER_NAME = "data", "tokenizer"  # folders in the output
READY_NAME = "ready.json"  # written last: the folder is then complete
PARTS = ("training", "held_out")
TARGET = "tokens"
PROMPT_CHARACTERS = 200
END = "<|endoftext|>"
VOCABULARY_MIN = 256 + 1  # all bytes, and the end of a text
TRAINING_CHARACTERS_MAX = 32_000_000  # more text changes a small vocabulary little


@dataclass(frozen=True)
class Data:
    """What a run reads. `prompt` is the beginning of something held out, `count` how many documents
    and records there are. keep() gives the files their places in the output."""

    tokenizer: Any
    training: Dataset
    held_out: Dataset
    prompt: str
    count: int
    keep: Callable[[], None]


@contextlib.contextmanager
def prepare(
    options: Options, choice: Choice, output: Path, ranks: Ranks | None = None
) -> Iterator[Data]:
    """Finds the data and turns it into windows; of several ranks the first does, and the others
    read them. Raises DataError where there is too little."""
    folder = output / DATA_NAME
    count = ranks.count if ranks is not None else 1
    if options.results.resume:
        yield _read(options, choice, folder, output / TOKENIZER_NAME, lambda: None, count)
        return
    if ranks is not None and ranks.rank:
        made = Path(led(ranks, str))
        yield _read(options, choice, made, made / TOKENIZER_NAME, lambda: None, count)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for left in dead_folders(folder, TARGET):
        remove(left)
    with WorkFolder(folder, TARGET) as work:
        try:
            tokenizer = work.path / TOKENIZER_NAME
            with writing(folder):
                led(ranks, lambda: _make(options, choice, tokenizer, work.path))
            yield _read(
                options, choice, work.path, tokenizer, lambda: _place(work.path, output), count
            )
        finally:
            remove(work.path)
            with contextlib.suppress(OSError):  # of a run that was refused
                folder.rmdir()


def check_vocabulary(choice: Choice) -> None:
    """Raises ValueError where the model's vocabulary is too small for a tokenizer of its own."""
    size = choice.config.vocab_size
    if choice.tokenizer is None and size < VOCABULARY_MIN:
        raise ValueError(
            f"a vocabulary of {size} is too small for the tokenizer that is trained, which has all "
            f"bytes: --vocabulary {VOCABULARY_MIN} is the smallest"
        )


def refuse_others(options: Options, choice: Choice, output: Path) -> None:
    """Raises ValueError where a run that is resumed would not be the one that it continues: other
    data are named than it read, or it has lost them, or its model is described otherwise."""
    ready = output / DATA_NAME / READY_NAME
    needed = [ready, *(output / DATA_NAME / f"{part}.arrow" for part in PARTS)]
    needed += [] if choice.tokenizer else [output / TOKENIZER_NAME / "tokenizer.json"]
    for file in needed:
        if not file.is_file():
            raise ValueError(f"cannot resume: the run has lost {file}: {ANEW}")
    before = json.loads(ready.read_text()).get("origin", {})
    refuse_other_model(before, choice, output)
    if "data" in options.given:
        refuse_other_data(before, options.start.data, output)


def _make(options: Options, choice: Choice, trained: Path, folder: Path) -> str:
    """Returns where the windows are. `trained`: where a tokenizer goes that has to be trained."""
    start = options.start
    limit = None if start.data_limit is None else parse_size(start.data_limit)
    limit_told = f" within --data-limit {start.data_limit}" if start.data_limit else ""
    named = find_sources(start.data)
    found = read_sources(named, start.held_out, folder / "read")
    sources = limited(list(found), limit, options.training.seed)
    parts = [split(rows, start.held_out, options.training.seed) for rows in sources]
    tokenizer = choice.load_tokenizer()
    if tokenizer is None:
        texts = (text for training, _ in parts for row in training for text in _strings(row))
        tokenizer = train_tokenizer(texts, choice.config.vocab_size)
        tokenizer.save_pretrained(trained)
    if len(tokenizer) > choice.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {choice.tokenizer} has {len(tokenizer)} tokens, the model's "
            f"vocabulary {choice.config.vocab_size}"
        )
    for name, rows_of in zip(PARTS, zip(*parts, strict=True), strict=True):
        if not any(map(len, rows_of)):
            raise DataError(
                "nothing is left to hold out: none of the data has two pieces of text or two "
                f"records{limit_told}. More data{limit_told and ' or a larger limit'} would help"
            )
        tokens = [
            encoded(rows, tokenizer, folder / f"{name}-{i}.arrow")
            for i, rows in enumerate(rows_of)
            if len(rows)
        ]
        packed(concatenate_datasets(tokens), start.sequence, folder / f"{name}.arrow")
    count = sum(sum(rows["ends"]) if "ends" in rows.features else len(rows) for rows in sources)
    held_out = next(rows for _, rows in parts if len(rows))
    prompt = _prompt(tokenizer, held_out[0])
    ready = {"count": count, "prompt": prompt, "origin": origin(choice, named)}
    (folder / READY_NAME).write_text(json.dumps(ready))
    return str(folder)


def _read(
    options: Options,
    choice: Choice,
    folder: Path,
    tokenizer: Path,
    keep: Callable[[], None],
    ranks: int,
) -> Data:
    ready = json.loads((folder / READY_NAME).read_text())
    windows = [Dataset.from_file(str(folder / f"{name}.arrow")) for name in PARTS]
    least = (options.training.batch * ranks, 1)
    batches = f"a batch for each of {ranks} ranks" if ranks > 1 else "a batch"
    for name, found, needed in zip(PARTS, windows, least, strict=True):
        if len(found) < needed:
            raise DataError(
                f"the {name.replace('_', '-')} data have {len(found)} windows of "
                f"{options.start.sequence} tokens, less than {batches if needed > 1 else 'one'}: "
                "more data, a shorter --sequence or a smaller --batch would help"
            )
    return Data(
        tokenizer=choice.load_tokenizer() or AutoTokenizer.from_pretrained(tokenizer),
        training=windows[0],
        held_out=windows[1],
        prompt=ready["prompt"],
        count=ready["count"],
        keep=keep,
    )


def _place(work: Path, output: Path) -> None:
    """Moves windows, and copies a tokenizer, whose folder may be on another disk."""
    folder, tokenizer = output / DATA_NAME, output / TOKENIZER_NAME
    (folder / READY_NAME).unlink(missing_ok=True)
    if (work / TOKENIZER_NAME).is_dir():
        tokenizer.mkdir(exist_ok=True)
        for file in (work / TOKENIZER_NAME).iterdir():
            shutil.copyfile(file, tokenizer / file.name)
    for name in (*(f"{part}.arrow" for part in PARTS), READY_NAME):
        os.replace(work / name, folder / name)
    remove(work)


def limited(sources: list[Dataset], limit: int | None, seed: int) -> list[Dataset]:
    """Of each source the same part, so that all together have no more than `limit` bytes."""
    total = sum(rows.data.nbytes for rows in sources)
    if limit is None or limit >= total:
        return sources
    return [_drawn(rows, max(1, len(rows) * limit // total), seed)[0] for rows in sources]


def split(rows: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Rows to train on, and about `fraction` of them held out, both in their order."""
    held_out, rest = _drawn(rows, min(len(rows) - 1, max(1, round(fraction * len(rows)))), seed)
    return rest, held_out


def _drawn(rows: Dataset, count: int, seed: int) -> tuple[Dataset, Dataset]:
    """So many rows, and the others."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows.select(np.sort(order[:count])), rows.select(np.sort(order[count:]))


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


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts up to about so many characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def _strings(row: dict[str, Any]) -> Iterator[str]:
    return (value for value in row.values() if isinstance(value, str))


def _prompt(tokenizer: Any, row: dict[str, Any]) -> str:
    """What a row begins with: a question, or the first lines up to the end of a word."""
    if turns := row.get("messages"):
        asked = [{k: v for k, v in turn.items() if v is not None} for turn in turns[:-1]]
        ids = template(tokenizer, asked, add_generation_prompt=True)
        return str(tokenizer.decode(ids))
    text = next((s for s in _strings(row) if s.strip()), "").lstrip()[:PROMPT_CHARACTERS]
    end = max(text.rfind("\n"), text.rfind(" "))
    return text[:end] if end > 0 else text
