"""Files that strata reads, as strangers may have left them: cut, with flipped bits, oversized,
naming other people's files, or with values that make no sense. Each gives one error of the
documented kind or none; the model stays as it was, or takes no step until a load has come to its
end; and no file outside of the file's own folder is touched.

Mutation n of a kind depends on the seed and on n alone. STRATA_MUTATIONS=20000 is a campaign.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from campaign import FIRST, SEED, tries
from damaged_files import KINDS, Kind, Owner

TOLD = 3000  # characters of a failure
DEEP = 100_000  # brackets
HUGE = 1_000_000  # bytes

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 0.5, -0.0, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64),
    *(1 << 70, -(1 << 70), 10**400, 1e308, float("inf"), float("nan")),
    *("", "x", "../precious", "/precious", "..", ".", "\0", "\ud800", "a" * 5000, "é" * 300),
    *([], {}, [[]], [None], [0] * 3000, {"strata.tensor": 7}, {"strata.tensor": -1}),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_strangers_files_give_one_error_or_none(tmp_path: Path, kind: type[Kind]) -> None:
    (tmp_path / "precious").write_text("a file of the user's")
    (tmp_path / "own").mkdir()
    case = kind(tmp_path / "own")
    outside = Watch(tmp_path / "precious")
    refused, wrong = 0, []
    for number in range(FIRST, FIRST + tries("STRATA_MUTATIONS", 300)):
        case.write(_mutated(case, random.Random(f"{SEED} {kind.__name__} {number}")))
        try:
            with outside:
                refused += not case.read()
            case.check()
            outside.check()
        except Exception:
            wrong.append(f"mutation {number}: {traceback.format_exc()[-TOLD:]}")
            case.renew()
    case.close()
    assert not wrong, f"{len(wrong)} files are handled wrongly, such as {wrong[0]}"
    assert refused or kind is Owner


class Watch:
    """Sees whether a file is opened, renamed or removed while it is entered."""

    def __init__(self, path: Path) -> None:
        """Adds a hook, which stays for the life of the process."""
        self._path = path
        self._before = path.stat()
        self._active = False
        self._seen = ""
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: Any) -> None:
        if not self._active or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        for argument in arguments:
            if isinstance(argument, str | bytes | os.PathLike):
                text = os.fsdecode(argument)
                if text.endswith("precious"):
                    self._seen = f"{event} of {text!r:.200}"

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def check(self) -> None:
        """Raises AssertionError where the file was looked for, or is another."""
        seen, self._seen = self._seen, ""
        assert not seen, seen
        now = self._path.stat()
        assert (now.st_size, now.st_mtime_ns, now.st_ino) == (
            self._before.st_size,
            self._before.st_mtime_ns,
            self._before.st_ino,
        ), "a file outside is another"


def _mutated(case: Kind, choice: random.Random) -> bytes:
    """The file with some damage."""
    content = case.content
    if content is None or choice.random() < 0.3:
        raw = case.whole
        for _ in range(choice.choice([1, 1, 2, 5])):
            raw = _damaged_bytes(raw, choice)
        return raw
    content = copy.deepcopy(content)
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        _damage(content, choice)
    return case.packed(content)


def _damaged_bytes(raw: bytes, choice: random.Random) -> bytes:
    at = choice.randrange(len(raw) + 1)
    match choice.randrange(8):
        case 0:
            return raw[:at]
        case 1 | 2 if at < len(raw):
            return raw[:at] + bytes([raw[at] ^ 1 << choice.randrange(8)]) + raw[at + 1 :]
        case 3:
            return raw[:at] + raw[choice.randrange(len(raw) + 1) :]
        case 4:
            return raw + bytes(choice.choice([1, 4096, HUGE]))
        case 5:
            return (
                raw[:at]
                + choice.choice([b"[", b'{"a":', b"1"]) * choice.choice([9, DEEP])
                + raw[at:]
            )
        case 6:
            return b"" if choice.random() < 0.2 else raw[at:]
        case _:
            return raw[:at] + choice.randbytes(choice.choice([1, 8, 300])) + raw[at:]


def _damage(content: Any, choice: random.Random) -> None:
    """Changes one value somewhere in it, takes it away, or doubles it."""
    place, key = content, None
    inner = content
    while isinstance(inner, dict | list) and inner and (key is None or choice.random() < 0.85):
        place = inner
        key = (
            choice.choice(list(inner)) if isinstance(inner, dict) else choice.randrange(len(inner))
        )
        inner = place[key]
    if key is None:
        return
    match choice.randrange(6):
        case 0:
            del place[key]
        case 1 if isinstance(place, list):
            place.append(copy.deepcopy(inner))
        case 1:
            place[f"{key}2"] = inner
        case 2 if type(inner) is int:
            place[key] = inner + choice.choice([-1, 1, 7, 1 << 20])
        case 2 if isinstance(inner, str):
            place[key] = choice.choice([inner[:-1], inner + "x", "../" + inner, inner.upper()])
        case _:
            place[key] = copy.deepcopy(choice.choice(VALUES))
