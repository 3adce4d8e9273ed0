"""What all campaigns share: how many tries the environment asks for, and numbers that processes
tell each other.

count = tries("STRATA_KILLS", 10)
board = Board(folder / "board")
board["step"] = 3
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SEED = int(os.environ.get("STRATA_SEED", "0"))
FIRST = int(os.environ.get("STRATA_FROM", "0"))  # continues a campaign that was cut short
# What a training process is doing.
DOING = ("nothing", "meet", "wrap", "load", "step", "snapshot", "save", "done")


def tries(name: str, few: int) -> int:
    """The number of tries that the variable asks for; `few` if it is not set."""
    return int(os.environ.get(name, few))


def sampled(cases: Sequence[T], few: int) -> list[T]:
    """Some of the cases, chosen by the seed; all of them with STRATA_COMBINATIONS=all."""
    asked = os.environ.get("STRATA_COMBINATIONS", str(few))
    if asked == "all":
        return list(cases)
    return random.Random(SEED).sample(cases, min(int(asked), len(cases)))


class Board:
    """A few numbers that a process and its parent share: a file that both map."""

    NAMES = ("doing", "writing", "complete", "step", "first", "raised")

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)  # the same size each time: what is there stays
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def __getitem__(self, name: str) -> float:
        return float(struct.unpack_from("d", self._memory, 8 * self.NAMES.index(name))[0])

    def __setitem__(self, name: str, value: float) -> None:
        struct.pack_into("d", self._memory, 8 * self.NAMES.index(name), value)

    @property
    def doing(self) -> str:
        """One of DOING."""
        return DOING[int(self["doing"])]

    @doing.setter
    def doing(self, what: str) -> None:
        self["doing"] = DOING.index(what)

    def clear(self) -> None:
        """Before a child begins. The newest step that is known to be complete stays."""
        for name in self.NAMES:
            if name != "complete":
                self[name] = 0
