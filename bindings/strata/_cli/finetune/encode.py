"""Rows of text and of records become tokens, and windows of equal length to train on.

    tokens = encoded(rows, tokenizer)              # a Dataset of input_ids and labels
    windows = packed(tokens, sequence=512)         # the same columns, 512 each

Both are found again in the cache of the datasets library.

A row is one of

    text                          learned whole, and ended by the end-of-text token
    messages                      a chat, as the tokenizer's template writes it
    prompt, completion            one behind the other; or lists of messages
    instruction, (input,) output  a user's turn and the answer to it

Of records, only answers are learned: the label of every other token is -100. In a chat these are
the turns of the assistant, as far as the template writes them alike whatever follows; so some
templates, which shorten earlier turns, teach the last one alone. Windows go across records.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher

from .files import DataError

SOURCE = Path(__file__).read_bytes()
IGNORED = -100  # of labels, in Transformers
COLUMNS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
ROWS_TOGETHER = 256
PLAIN = "### Instruction:\n{}\n\n### Response:\n"  # for tokenizers without a template

Tokens = tuple[list[int], list[int]]  # and their labels
Columns = dict[str, list[Any]]


def encoded(rows: Dataset, tokenizer: Any) -> Dataset:
    """The tokens of every row. Raises DataError for records of another kind."""
    encode = _texts if "ends" in rows.column_names else _records
    return rows.map(
        lambda columns: encode(tokenizer, columns),
        batched=True,
        batch_size=ROWS_TOGETHER,
        remove_columns=rows.column_names,
        features=COLUMNS,
        new_fingerprint=_fingerprint(rows, tokenizer),
    )


def packed(tokens: Dataset, sequence: int) -> Dataset:
    """Windows, without those that hold nothing to learn; what does not fill one is left out."""
    return tokens.map(
        _Packer(sequence),
        batched=True,
        batch_size=ROWS_TOGETHER,
        features=COLUMNS,
        new_fingerprint=_fingerprint(tokens, sequence),
    )


def _fingerprint(rows: Dataset, made_by: Any) -> str:
    """Names what is made of the rows. The library's own would not change with this file."""
    return Hasher.hash([rows._fingerprint, made_by, SOURCE])


class _Packer:
    """Keeps what did not fill a window for the next rows."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._left: Tokens = ([], [])

    def __call__(self, rows: Columns) -> Columns:
        """Called with some rows, in their order."""
        ids, labels = self._left
        for more_ids, more_labels in zip(rows["input_ids"], rows["labels"], strict=True):
            ids += more_ids
            labels += more_labels
        whole = len(ids) // self._sequence * self._sequence
        self._left = ids[whole:], labels[whole:]
        windows = [slice(i, i + self._sequence) for i in range(0, whole, self._sequence)]
        taught = [w for w in windows if any(label != IGNORED for label in labels[w][1:])]
        return {"input_ids": [ids[w] for w in taught], "labels": [labels[w] for w in taught]}


def _texts(tokenizer: Any, columns: Columns) -> Columns:
    """Of pieces of documents."""
    found = tokenizer(columns["text"], add_special_tokens=False, verbose=False)["input_ids"]
    pairs = zip(found, columns["ends"], strict=True)
    ids = [tokens + _end(tokenizer) if last else tokens for tokens, last in pairs]
    return {"input_ids": ids, "labels": ids}


def _records(tokenizer: Any, columns: Columns) -> Columns:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    pairs = [_record(tokenizer, row) for row in rows]
    return {"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]}


def _record(tokenizer: Any, row: dict[str, Any]) -> Tokens:
    given = {name: value for name, value in row.items() if value is not None}
    for kind, encode in _ENCODE.items():
        if kind in given:
            return encode(tokenizer, given)
    raise DataError(
        f"a record with {', '.join(given) or 'nothing'} is not understood: it needs messages, "
        "prompt and completion, instruction and output, or text"
    )


def _text(tokenizer: Any, row: dict[str, Any]) -> Tokens:
    ids = tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
    ids += _end(tokenizer)
    return ids, list(ids)


def _chat(tokenizer: Any, row: dict[str, Any]) -> Tokens:
    return _messages(tokenizer, row["messages"])


def _completion(tokenizer: Any, row: dict[str, Any]) -> Tokens:
    prompt, completion = row["prompt"], row.get("completion")
    if completion is None:
        raise DataError("a record with a prompt has no completion")
    if isinstance(prompt, str):
        return _answer(tokenizer, prompt, completion)
    return _messages(tokenizer, [*prompt, *completion], learned_from=len(prompt))


def _instruction(tokenizer: Any, row: dict[str, Any]) -> Tokens:
    answer = row.get("output")
    if answer is None:
        raise DataError("a record with an instruction has no output")
    asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    if not tokenizer.chat_template:
        return _answer(tokenizer, PLAIN.format(asked), answer)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return _messages(tokenizer, turns)


# What a record is told by.
_ENCODE = {"messages": _chat, "prompt": _completion, "instruction": _instruction, "text": _text}


def _answer(tokenizer: Any, prompt: str, answer: str) -> Tokens:
    begin, end = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (prompt, answer))
    end += _end(tokenizer)
    return begin + end, [IGNORED] * len(begin) + end


def _messages(tokenizer: Any, turns: Sequence[dict[str, Any]], learned_from: int = 0) -> Tokens:
    """A chat, of which the assistant's turns from one on are learned."""
    # The library gives every message the fields that any of them has.
    turns = [{name: v for name, v in turn.items() if v is not None} for turn in turns]
    ids = template(tokenizer, turns)
    labels = [IGNORED] * len(ids)
    for i, turn in enumerate(turns):
        if i >= learned_from and turn.get("role") == "assistant":
            before = len(template(tokenizer, turns[:i], add_generation_prompt=True))
            until = template(tokenizer, turns[: i + 1])
            if ids[: len(until)] == until:
                labels[before : len(until)] = ids[before : len(until)]
    return ids, labels


def template(tokenizer: Any, turns: Sequence[dict[str, Any]], **more: Any) -> Any:
    """The tokens of a chat. Raises DataError where the tokenizer cannot write it."""
    if not tokenizer.chat_template:
        raise DataError("records are chats, and the model's tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(turns, **{"return_dict": False, **more})
    except Exception as error:  # templates raise what they like
        raise DataError(f"the tokenizer's chat template refuses a chat: {error}") from error


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
