"""Text and records are found, set aside, turned into tokens and packed into windows."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from strata._cli.finetune.data import END, limited, split, train_tokenizer
from strata._cli.finetune.encode import IGNORED, encoded, packed
from strata._cli.finetune.files import DataError, find_sources, read_sources

TEXT = "The cat sat on the mat.\nThe dog sat on the log.\n" * 20
TURNS = [
    {"role": "user", "content": "who sat on the mat"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "and on the log"},
    {"role": "assistant", "content": "the dog"},
]
ADDING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As some do whose models think: what an earlier answer began with is left out later.
SHORTENING = ADDING.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think>{% endif %}{{ m['content'] }}",
)


def write(folder: Path, **files: bytes | str) -> Path:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
    return folder


def rows_of(*paths: Path, share: float = 0.5) -> list[Dataset]:
    return list(read_sources(find_sources(paths), share))


def tokenizer(template: str | None = None) -> Any:
    made = train_tokenizer([TEXT], 300)
    made.chat_template = template
    return made


def learned(row: dict[str, Any], template: str | None = None) -> tuple[str, str]:
    """What a record becomes, and what of it is learned."""
    made = tokenizer(template)
    (tokens,) = encoded(Dataset.from_list([row]), made)
    kept = [label for label in tokens["labels"] if label != IGNORED]
    pairs = zip(tokens["input_ids"], tokens["labels"], strict=True)
    assert all(label in (token, IGNORED) for token, label in pairs)
    return made.decode(tokens["input_ids"]), made.decode(kept)


def test_folders_are_searched_and_what_is_not_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "deep" / "er", note="in the depth", **{"chat.jsonl": "{}"})
    write(tmp_path / ".hidden", secret="never read")
    write(tmp_path, b="second\n", a="first", picture=b"\x89PNG\0\1", empty="", latin=b"\xe9t\xe9")
    sources = find_sources([tmp_path, tmp_path / "a"])
    assert [file.name for file in sources.texts] == ["a", "b", "note"]
    assert [file.name for file in sources.records] == ["chat.jsonl"]


def test_nothing_but_other_files_is_an_error_that_names_them(tmp_path: Path) -> None:
    write(tmp_path, picture=b"\x89PNG\0\1", empty=" \n", latin=b"\xe9t\xe9")
    with pytest.raises(DataError) as caught:
        find_sources([tmp_path])
    for expected in ("picture (is not text", "empty (is empty)", "latin (is not text in UTF-8)"):
        assert expected in str(caught.value)
    with pytest.raises(DataError, match="picture is not text"):
        find_sources([tmp_path / "picture"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_sources([tmp_path / "nowhere"])


def test_documents_are_cut_at_lines_and_lose_nothing(tmp_path: Path) -> None:
    write(tmp_path, a="\ufeff" + TEXT, b="x" * 900, c="one\r\ntwo")
    (rows,) = rows_of(tmp_path, share=0.05)
    assert "".join(rows["text"]) == TEXT + "x" * 900 + "one\r\ntwo"
    assert sum(rows["ends"]) == 3
    of_a = [row["text"] for row in rows if "x" not in row["text"]][:-1]
    assert len(of_a) > 5
    assert all(piece.endswith("\n") for piece in of_a)
    assert max(len(piece) for piece in rows["text"]) < 250


def test_the_same_contents_are_found_again(tmp_path: Path) -> None:
    for folder, text in (("one", TEXT), ("two", TEXT), ("other", TEXT + "end\n")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, a=text)
    found = [rows_of(tmp_path / folder)[0] for folder in ("one", "two", "other")]
    tokens = [packed(encoded(rows, tokenizer()), 16) for rows in found]
    for made in (found, tokens):
        one, two, other = (rows.cache_files[0]["filename"] for rows in made)
        assert one == two != other
    assert "end" in "".join(found[2]["text"])
    (tmp_path / "two" / "a").write_text("anew\n" * 9)  # under the same name
    assert "anew" in rows_of(tmp_path / "two")[0]["text"][0]


def test_the_same_part_is_set_aside_for_the_same_seed(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": [str(i) for i in range(40)]})
    training, held_out = split(rows, 0.1, seed=0)
    assert len(held_out) == 4
    assert sorted([*training["text"], *held_out["text"]], key=int) == rows["text"][:]
    assert sorted(training["text"], key=int) == training["text"][:], "documents keep their order"
    assert split(rows, 0.1, seed=0)[1]["text"][:] == held_out["text"][:]
    assert split(rows, 0.1, seed=1)[1]["text"][:] != held_out["text"][:]


def test_a_limit_takes_of_every_source(tmp_path: Path) -> None:
    sources = [Dataset.from_dict({"text": ["x" * 50] * count}) for count in (100, 300)]
    total = sum(rows.data.nbytes for rows in sources)
    assert [len(rows) for rows in limited(sources, total // 10, seed=0)] == [10, 30]
    assert limited(sources, total, seed=0) is sources


def test_a_trained_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    made = tokenizer()
    assert len(made) <= 300
    strange = "naïve 日本 \t\n  two  spaces"
    rows = Dataset.from_dict({"text": [TEXT, strange, "cut"], "ends": [True, True, False]})
    tokens = encoded(rows, made)
    assert [made.decode(ids) for ids in tokens["input_ids"]] == [TEXT + END, strange + END, "cut"]
    assert tokens["input_ids"][:] == tokens["labels"][:]
    assert len(tokens[0]["input_ids"]) < len(TEXT) / 2


def test_windows_lose_nothing_between_rows_and_hold_something_to_learn(tmp_path: Path) -> None:
    ids = [list(range(begin, begin + 7)) for begin in range(0, 7 * 600, 7)]
    labels = [row if row[0] >= 700 else [IGNORED] * 7 for row in ids]
    tokens = Dataset.from_dict({"input_ids": ids, "labels": labels})
    windows = packed(tokens, 10)
    flat = [token for window in windows["input_ids"] for token in window]
    assert flat == list(range(700, 7 * 600))
    assert {len(window) for window in windows["input_ids"]} == {10}


def test_of_chats_the_answers_are_learned(tmp_path: Path) -> None:
    whole, answers = learned({"messages": TURNS}, ADDING)
    assert whole.startswith("<user>who sat on the mat<|endoftext|><assistant>the cat<|endoftext|>")
    assert answers == f"the cat{END}the dog{END}"


def test_of_a_template_that_shortens_turns_the_last_is_learned(tmp_path: Path) -> None:
    assert learned({"messages": TURNS}, SHORTENING)[1] == f"<think>the dog{END}"


def test_of_instructions_and_prompts_the_answer_is_learned(tmp_path: Path) -> None:
    plain = {"prompt": "who? ", "completion": "the cat"}
    assert learned(plain) == (f"who? the cat{END}", f"the cat{END}")
    asked = {"instruction": "who sat", "input": "on the mat", "output": "the cat"}
    whole, answer = learned(asked)
    assert whole == (f"### Instruction:\nwho sat\n\non the mat\n\n### Response:\nthe cat{END}")
    assert answer == f"the cat{END}"
    whole, answer = learned(asked, ADDING)
    assert whole == f"<user>who sat\n\non the mat{END}<assistant>the cat{END}"
    assert answer == f"the cat{END}"
    parts = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert learned(parts, ADDING)[1] == f"the dog{END}"


def test_records_are_read_with_the_fields_of_others(tmp_path: Path) -> None:
    lines = [{"messages": TURNS[:2]}, {"messages": [{**TURNS[0], "name": "me"}, TURNS[1]]}]
    write(tmp_path, **{"a.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    (rows,) = rows_of(tmp_path / "a.jsonl")
    tokens = encoded(rows, tokenizer(ADDING))
    assert tokens[0]["input_ids"] == tokens[1]["input_ids"]
    lines = [{"text": "the cat"}, {"messages": TURNS[:2]}]
    write(tmp_path, **{"b.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    (rows,) = rows_of(tmp_path / "b.jsonl")
    tokens = encoded(rows, tokenizer(ADDING))
    assert tokens[0]["labels"] == tokens[0]["input_ids"]
    assert tokens[1]["labels"][0] == IGNORED


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"question": "x", "reply": "y"}, None, "a record with question, reply is not understood"),
        ({"messages": TURNS}, None, "the model's tokenizer has no chat template"),
        ({"messages": TURNS}, "{{ raise_exception('roles!') }}", "refuses a chat: roles!"),
        ({"prompt": "x"}, None, "has no completion"),
        ({"instruction": "x"}, None, "has no output"),
    ],
)
def test_records_that_cannot_be_learned_are_refused(
    tmp_path: Path, row: dict[str, Any], template: str | None, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        learned(row, template)


def test_a_file_that_is_no_records_is_named(tmp_path: Path) -> None:
    write(tmp_path, **{"bad.jsonl": "this is prose\n"})
    with pytest.raises(DataError, match=r"bad\.jsonl cannot be read as records"):
        rows_of(tmp_path)
