"""Runs that are killed by SIGKILL at random moments, while they wrap, load, train, accumulate
gradients, save, take snapshots and remove old ones. After each kill the newest complete snapshot
and the checkpoint must load with the bits of a run that nobody interrupted, and training must go on
to the same bits.

Kill n depends on the seed, on n and on the machine's clock. STRATA_KILLS=1000 is a campaign.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import strata
import torch
from campaign import DOING, FIRST, SEED, Board, tries
from killed_runs import (
    LAST_STEP,
    WRITING,
    forked,
    read_reference,
    reference,
    survivor,
    victim,
)
from random_training import HIDDEN, INPUTS, Setting
from torch import nn

KILLS_PER_RUN = 20  # then a new run begins, with other settings
UPDATES = ("on_step", "in_backward", strata.LockFree(max_staleness=0))
PAGE_SIZES = ("64KiB", "128KiB")
ENGINES = ("auto", "auto", "libaio", "threads")
WAIT_SECONDS = 600  # until a child is where it is killed
LOOK_SECONDS = 0.0005


def test_killed_runs_lose_nothing(tmp_path: Path) -> None:
    model = nn.Linear(INPUTS, HIDDEN)  # imports all that children need
    strata.plan(model, torch.optim.AdamW(model.parameters()), memory={"host": "32MiB"})
    campaign = Campaign(tmp_path)
    for number in range(FIRST, FIRST + tries("STRATA_KILLS", 60)):
        campaign.kill(number)
    print(f"kills: {dict(campaign.where)}")


class Campaign:
    """Kills one run after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._error, self._run = folder, folder / "error", folder / "killed"
        self._board = Board(folder / "board")
        self._expected: dict[str, list[tuple[bytes, float]]] = {}
        self.where: Counter[str] = Counter()

    def kill(self, number: int) -> None:
        """Kills a run, and looks at what it left."""
        setting = _setting(random.Random(f"{SEED} {number // KILLS_PER_RUN}"))
        if number % KILLS_PER_RUN == 0 or self._board["step"] > LAST_STEP - 50:
            shutil.rmtree(self._run, ignore_errors=True)
            self._board["complete"] = 0
        for drive in range(setting.drives):
            (self._run / f"drive{drive}").mkdir(parents=True, exist_ok=True)
        choice = random.Random(f"{SEED} kill {number}")
        self._board.clear()
        self.where[self._kill(choice, setting)] += 1
        look = Setting(**vars(setting) | {"place": choice.choice(["ssd", "host"])})
        expected = self._expected_of(setting)
        child = forked(lambda: survivor(self._board, look, self._run, expected), self._error)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"kill {number}, {setting}, status {status}: {self._said()}"

    def _said(self) -> str:
        return self._error.read_text() if self._error.exists() else "no words"

    def _expected_of(self, setting: Setting) -> list[tuple[bytes, float]]:
        key = f"{setting.state_dtype} {setting.backwards}"
        if key not in self._expected:
            folder = self._folder / key
            (folder / "drive0").mkdir(parents=True)
            plain = Setting(state_dtype=setting.state_dtype, backwards=setting.backwards)
            child = forked(lambda: reference(plain, folder, folder / "digests"), self._error)
            assert os.waitpid(child, 0)[1] == 0, self._said()
            self._expected[key] = read_reference(folder / "digests")
        return self._expected[key]

    def _kill(self, choice: random.Random, setting: Setting) -> str:
        """Returns what the run was doing."""
        board = self._board
        target, most = choice.choice(
            [("wrap", 0.05), ("load", 0.03), ("step", 0.25), ("step", 0.25), ("", 150), ("", 40)]
        )
        operation = 0 if target else choice.randint(1, int(most))
        delay = choice.random() * most
        child = forked(lambda: victim(board, setting, self._run, operation), self._error)
        end = time.monotonic() + WAIT_SECONDS
        goal = DOING.index(target or "done")
        while board["doing"] < goal and time.monotonic() < end:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break  # it killed itself, or failed
            time.sleep(LOOK_SECONDS)
        if target:
            time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), f"it failed before the kill, {setting}: {self._said()}"
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{setting}: {self._said()}"
        return WRITING[int(board["writing"])] if board["writing"] else board.doing


def _setting(choice: random.Random) -> Setting:
    update = choice.choice(UPDATES)
    return Setting(
        place=choice.choice(["ssd", "ssd", "host"]),
        update=update,
        state_dtype=choice.choice([torch.float32, torch.float32, torch.bfloat16, "8bit"]),
        page_size=choice.choice(PAGE_SIZES),
        io_engine=choice.choice(ENGINES),
        drives=choice.choice([1, 1, 2]),
        keep=choice.choice([1, 2, 3]),
        every=choice.choice([1, 1, 2, 5]),
        backwards=1 if update == "in_backward" else choice.choice([1, 1, 2, 3]),
        saves=choice.choice([True, False]),
    )
