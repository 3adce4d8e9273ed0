"""The data of a run: made from what --data names, and kept in the output folder.

    data = prepare(options, choice, output, ranks)
    data.training[0]["input_ids"]        # a window; all are mapped from a file
    data.keep(output)                    # the run is accepted

What is read, and the tokens and windows made of it, are in the cache of the datasets library, which
finds them again by contents, tokenizer and options. A run that is accepted has a copy of its
windows and of a trained tokenizer in its output folder, and a resumed run reads that: it sees the
very same ones. refuse_others() holds it against what it is told now.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..._config.ranks import Ranks
from ..._config.sizes import parse_size
from ..._storage.replacing import write_text, writing
from ..models import Choice
from .encode import encoded, packed, template
from .files import DataError, find_sources, read_sources
from .options import Options
from .origin import ANEW, origin, refuse_other_data, refuse_other_model
from .ranks import led

DATA_NAME, TOKENIZER_NAME = "data", "tokenizer"  # folders in the output
FACTS_NAME = "facts.json"  # in the first: what is known of the windows
PARTS = ("training", "held_out")
PROMPT_CHARACTERS = 200
END = "<|endoftext|>"
VOCABULARY_MIN = 256 + 1  # all bytes, and the end of a text
TRAINING_CHARACTERS_MAX = 32_000_000  # more text changes a small vocabulary little


@dataclass(frozen=True)
class Data:
    """What a run reads: windows by part, and facts, which are JSON. `prompt` is the beginning of
    something held out, `count` the number of documents and records, `origin` what they were made
    from, `tokenizer` the one that was trained, or null."""

    tokenizer: Any
    windows: DatasetDict
    facts: dict[str, Any]

    @property
    def training(self) -> Dataset:
        """To train on."""
        return self.windows[PARTS[0]]

    @property
    def held_out(self) -> Dataset:
        """To evaluate on."""
        return self.windows[PARTS[1]]

    def keep(self, output: Path) -> None:
        """Copies what a resumed run needs."""
        folder = output / DATA_NAME
        with writing(folder):
            self.windows.save_to_disk(folder, num_shards=dict.fromkeys(PARTS, 1))
            write_text(folder / FACTS_NAME, json.dumps(self.facts))
        if self.facts["tokenizer"]:
            self.tokenizer.save_pretrained(output / TOKENIZER_NAME)


def prepare(options: Options, choice: Choice, output: Path, ranks: Ranks | None = None) -> Data:
    """Finds the data and turns it into windows. With several ranks the first does, and the others
    read them. Raises DataError where there is too little."""
    datasets.disable_progress_bars()
    if options.results.resume:
        facts = json.loads((output / DATA_NAME / FACTS_NAME).read_text())
        windows = DatasetDict.load_from_disk(output / DATA_NAME)
    else:
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        with writing(cache):
            facts = json.loads(led(ranks, lambda: json.dumps(_make(options, choice))))
        files = facts.pop("files")
        if lost := [file for file in files.values() if not Path(file).is_file()]:
            raise DataError(
                f"rank 0 made {lost[0]}, which is not seen here: set HF_DATASETS_CACHE to a folder "
                "that all machines share"
            )
        windows = DatasetDict({part: Dataset.from_file(files[part]) for part in PARTS})
    _check_enough(windows, options, ranks.count if ranks is not None else 1)
    tokenizer = choice.load_tokenizer() or _wrapped(Tokenizer.from_str(facts["tokenizer"]))
    return Data(tokenizer, windows, facts)


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
    folder = output / DATA_NAME
    shards = [folder / part / "data-00000-of-00001.arrow" for part in PARTS]
    for file in (folder / FACTS_NAME, folder / "dataset_dict.json", *shards):
        if not file.is_file():
            raise ValueError(f"cannot resume: the run has lost {file}: {ANEW}")
    before = json.loads((folder / FACTS_NAME).read_text())["origin"]
    refuse_other_model(before, choice, output)
    if "data" in options.given:
        refuse_other_data(before, options.start.data, output)


def _make(options: Options, choice: Choice) -> dict[str, Any]:
    """Facts, and the `files` of the windows by part, in the cache."""
    start = options.start
    limit = None if start.data_limit is None else parse_size(start.data_limit)
    limit_told = f" within --data-limit {start.data_limit}" if start.data_limit else ""
    named = find_sources(start.data)
    found = read_sources(named, start.held_out)
    sources = limited(list(found), limit, options.training.seed)
    parts = [split(rows, start.held_out, options.training.seed) for rows in sources]
    tokenizer, trained = choice.load_tokenizer(), None
    if tokenizer is None:
        texts = (text for training, _ in parts for row in training for text in _strings(row))
        tokenizer = train_tokenizer(texts, choice.config.vocab_size)
        trained = tokenizer.backend_tokenizer.to_str()
    if len(tokenizer) > choice.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {choice.tokenizer} has {len(tokenizer)} tokens, the model's "
            f"vocabulary {choice.config.vocab_size}"
        )
    files = {}
    for part, rows_of in zip(PARTS, zip(*parts, strict=True), strict=True):
        if not any(map(len, rows_of)):
            raise DataError(
                "nothing is left to hold out: none of the data has two pieces of text or two "
                f"records{limit_told}. More data{limit_told and ' or a larger limit'} would help"
            )
        tokens = [encoded(rows, tokenizer) for rows in rows_of if len(rows)]
        windows = packed(concatenate_datasets(tokens), start.sequence)
        files[part] = windows.cache_files[0]["filename"]
    held_out = next(rows for _, rows in parts if len(rows))
    return {
        "files": files,
        "count": sum(sum(r["ends"]) if "ends" in r.features else len(r) for r in sources),
        "prompt": _prompt(tokenizer, held_out[0]),
        "origin": origin(choice, named),
        "tokenizer": trained,
    }


def _check_enough(windows: DatasetDict, options: Options, ranks: int) -> None:
    least = (options.training.batch * ranks, 1)
    batches = f"a batch for each of {ranks} ranks" if ranks > 1 else "a batch"
    for part, needed in zip(PARTS, least, strict=True):
        if len(windows[part]) < needed:
            raise DataError(
                f"the {part.replace('_', '-')} data have {len(windows[part])} windows of "
                f"{options.start.sequence} tokens, less than {batches if needed > 1 else 'one'}: "
                "more data, a shorter --sequence or a smaller --batch would help"
            )


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
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> Any:
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
