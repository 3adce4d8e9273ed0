"""Runs that are killed by SIGKILL at random moments, while they wrap, load, train, accumulate
gradients, save, take snapshots and remove old ones: after each kill the newest complete snapshot
must load, and what was saved, with the bits of a run that nobody interrupted, and training must go
on to the same bits.

Kill n depends on the seed and on n alone but for what the machine's clock does; --from goes on
behind an interrupted campaign.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import strata
import strata.checkpoint
import torch

from .common import Context, Figure, commit
from .crash_child import (
    DOING,
    LAST_STEP,
    WRITING,
    Board,
    Setting,
    forked,
    prepare,
    read_reference,
    reference,
    survivor,
    victim,
)

KILLS, QUICK_KILLS = 1000, 4
KILLS_PER_RUN = 20  # then a new run begins, with other settings
SECONDS_TARGET = 0.5  # a kill, with the look at what it left
UPDATES = ("on_step", "in_backward", strata.LockFree(max_staleness=0))
PAGE_SIZES = ("64KiB", "128KiB")
ENGINES = ("auto", "auto", "libaio", "threads")
WAIT_SECONDS = 600  # for a child to come to where it is killed, or to its end
LOOK_SECONDS = 0.0005


def run(context: Context) -> Iterator[Figure]:
    """Yields what was killed where, and what was lost by it."""
    prepare()
    first = context.first or 0
    count = context.count or (QUICK_KILLS if context.quick else KILLS)
    with context.scratch() as folder:
        campaign = Campaign(context, folder)
        start = time.perf_counter()
        for number in range(first, first + count):
            campaign.kill(number)
            if (number + 1 - first) % 100 == 0:
                seconds = (time.perf_counter() - start) / (number + 1 - first)
                context.say(f"{number + 1 - first} of {count} kills, {seconds:.2f} s each")
        seconds = (time.perf_counter() - start) / count
    yield Figure("crash", "kills", count, "kills")
    for where, kills in sorted(campaign.where.items()):
        yield Figure("crash", f"kills_in_{where}", kills, "kills")
    yield Figure("crash", "runs_that_lost_something", campaign.failures, "kills", target=0)
    yield Figure("crash", "seconds_per_kill", seconds, "s", SECONDS_TARGET)


class Campaign:
    """Kills one run after the other."""

    def __init__(self, context: Context, folder: Path) -> None:
        """`folder` is for the runs."""
        self._context = context
        self._folder = folder
        self._run: Path | None = None
        self._board = Board()
        self._expected: dict[str, list[tuple[bytes, float]]] = {}
        self.where: Counter[str] = Counter()
        self.failures = 0

    def kill(self, number: int) -> None:
        """Kills a run, looks at what it left, and counts what was lost."""
        choice = random.Random(f"{self._context.seed} {number // KILLS_PER_RUN}")
        setting = _setting(choice)
        if self._run is None or number % KILLS_PER_RUN == 0 or self._board.step > LAST_STEP - 50:
            self._begin(setting)
        assert self._run is not None
        choice = random.Random(f"{self._context.seed} kill {number}")
        self._board.clear()
        self.where[self._kill(choice, setting)] += 1
        run = self._run
        look = Setting(**vars(setting) | {"place": choice.choice(["ssd", "host"])})
        expected = self._expected_of(setting)
        failure = self._wait(
            forked(lambda: survivor(self._board, look, run, expected), self._error)
        )
        if failure:
            self.failures += 1
            kept = self._folder.parent / f"crash-{self._context.seed}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.move(self._run, kept)
            self._run = None
            self._context.say(f"kill {number} ({commit()}, {setting}), kept in {kept}: {failure}")

    @property
    def _error(self) -> Path:
        return self._folder / "error"

    def _begin(self, setting: Setting) -> None:
        if self._run is not None:
            shutil.rmtree(self._run)
        self._run = self._folder / "killed"
        self._run.mkdir()
        for drive in range(setting.drives):
            (self._run / f"drive{drive}").mkdir()
        self._board.complete = 0
        self._board.clear()

    def _expected_of(self, setting: Setting) -> list[tuple[bytes, float]]:
        key = f"{setting.state_dtype} {setting.backwards}"
        if key not in self._expected:
            folder = self._folder / "whole"
            (folder / "drive0").mkdir(parents=True)
            plain = Setting(state_dtype=setting.state_dtype, backwards=setting.backwards)
            to = folder / "digests"
            failure = self._wait(forked(lambda: reference(plain, folder, to), self._error))
            if failure:
                raise RuntimeError(f"the run that nobody interrupts failed: {failure}")
            self._expected[key] = read_reference(to)
            shutil.rmtree(folder)
        return self._expected[key]

    def _kill(self, choice: random.Random, setting: Setting) -> str:
        """Returns what the run was doing."""
        board, folder = self._board, self._run
        assert folder is not None
        target, most = choice.choice(
            [("wrap", 0.05), ("load", 0.03), ("step", 0.25), ("step", 0.25), ("", 150), ("", 40)]
        )
        operation = 0 if target else choice.randint(1, int(most))
        delay = choice.random() * most
        child = forked(lambda: victim(board, setting, folder, operation), self._error)
        end = time.monotonic() + WAIT_SECONDS
        goal = DOING.index(target) if target else DOING.index("done")
        while board.doing < goal and time.monotonic() < end:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break  # it killed itself, or failed
            time.sleep(LOOK_SECONDS)
        if target:
            time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            self.failures += 1
            said = self._error.read_text() if self._error.exists() else f"status {status}"
            self._context.say(f"it failed before it was killed ({setting}): {said}")
        return WRITING[board.writing] if board.writing else DOING[board.doing]

    def _wait(self, child: int) -> str:
        """What a child failed with; "": it came to its end."""
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return ""
        text = self._error.read_text() if self._error.exists() else "it said nothing"
        self._error.unlink(missing_ok=True)
        return f"status {status}: {text}"


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
