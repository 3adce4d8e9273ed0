"""Ranks of this machine, one of which is killed by SIGKILL at a random moment, while they meet,
load, train and save: every other one must end in time with one exception that says which, where and
in what, and the next run, of as many ranks or fewer, goes on from the newest checkpoint to the bits
of a run that nobody interrupted. Then one is stopped by SIGSTOP: the others wait, say for whom, and
go on when it does; or end, where `rank_timeout` is given.

Round n depends on the seed and on n alone but for what the machine's clock does.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from torch import distributed

from .common import Context, Figure
from .peers.child import Child
from .rank_loss_child import CHECKPOINT, DIGESTS, LAST_STEP, STORE_PORT, Board, Setting, start_order

KILLS_PER_RUN = 10  # then a new run begins, with other settings
HEARD_S = 2.0  # in which all others have raised
WAIT_S = 60.0  # for ranks to come to where one is killed, or to their end
LOOK_S = 0.0005
STOPPED_S, QUICK_STOPPED_S = 60.0, 3.0
SAID_S = 10.0  # behind which the log names who is waited for
TIMEOUT_S = 2.0  # rank_timeout
NEVER_S = 1e9
# What the victim does, and so many seconds behind it at most.
MOMENTS = [
    *(("wrap", 0.15), ("load", 0.05), ("step", 0.05), ("step", 0.3), ("step", 0.6)),
    *(("save", 0.01), ("save", 0.03)),
]
WHERE = r", on {host}"
UNIT = r" in step \d+ since strata.wrap\(\), last in the (forward|backward) of "
# What others say of the victim, by what it did: ahead of its first forward it was in no unit, and
# ahead of the meeting of all nobody knows more of it than torch.distributed.
WORDS = {
    "wrap": r"(rank {rank}|another rank) ",
    "load": r"rank {rank} has (failed or )?died" + WHERE,
    "step": r"rank {rank} has (failed or )?died" + WHERE + UNIT,
    "save": r"rank {rank} has (failed or )?died" + WHERE + UNIT,
}


def run(context: Context) -> Iterator[Figure]:
    """Yields how soon others knew, and what was lost."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.rank_loss_child"]
    environment = os.environ | {STORE_PORT: str(store.port)}
    with context.scratch() as folder, closing(Child(command, environment)) as server:
        server.ask(json.dumps({"digests": str(folder)}))
        campaign = Campaign(context, folder, server)
        count = context.count or (3 if context.quick else context.rounds)
        first = context.first or 0
        for number in range(first, first + count):
            campaign.kill(number)
            if (number + 1 - first) % 20 == 0:
                context.say(f"{number + 1 - first} of {count} kills")
        campaign.come_to_the_end()
        yield from campaign.figures()
        yield from _stop(context, folder, server, campaign.fail)
        yield from _give_up(folder, server, campaign.fail)
        yield Figure("rank-loss", "failures", campaign.failures, "", target=0)


class Campaign:
    """Kills a rank of one run after the other."""

    def __init__(self, context: Context, folder: Path, server: Child) -> None:
        self._context, self._folder, self._server = context, folder, server
        self._setting = Setting(str(folder))
        self._kills = 0
        self.where: Counter[str] = Counter()
        self.heard: list[float] = []  # seconds from the kill to an exception, of each other rank
        self.ended: list[float] = []  # and to the end of its process
        self.failures = 0

    def fail(self, what: str) -> None:
        """Counts it, and says it."""
        self.failures += 1
        self._context.say(what)

    def kill(self, number: int) -> None:
        """Starts ranks, kills one, and looks at what the others say."""
        choice = random.Random(f"{self._context.seed} {number // KILLS_PER_RUN}")
        if number % KILLS_PER_RUN == 0 or self._kills == 0:
            _clear(self._folder)
            self._setting = replace(
                self._setting,
                place=choice.choice(["host", "ssd"]),
                page_size=choice.choice(["64KiB", "128KiB"]),
                every=choice.choice([1, 2, 5]),
            )
        self._kills += 1
        choice = random.Random(f"{self._context.seed} kill {number}")
        setting = replace(self._setting, ranks=choice.choice([2, 2, 2, 3, 3, 4]))
        victim = choice.randrange(setting.ranks)
        doing, most = choice.choice(MOMENTS)
        board = _board(self._folder)
        pids = self._server.ask(start_order(setting))["pids"]
        _await(lambda: board.get(victim)[0] in (doing, "done"))
        time.sleep(choice.random() * most)
        did, made, _, _, first = board.get(victim)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        outcome = self._server.ask(json.dumps({"wait": WAIT_S}))
        self.where[did] += 1
        name = f"kill {number} of rank {victim} of {setting.ranks} in {did}"
        if outcome["codes"][victim] != -signal.SIGKILL:
            self.fail(f"{name}: it ended with {outcome['codes'][victim]}: {self._log(victim)}")
        if did == "done":
            _clear(self._folder)  # nothing is left to train
            return
        for rank in range(setting.ranks):
            if rank != victim:
                self._look(name, rank, outcome["codes"][rank], outcome["ended"][rank] - killed)
                raised = board.get(rank)[3]
                self.heard.append((raised or outcome["ended"][rank]) - killed)
                # In its first step it may not have come to a unit.
                words = WORDS["load" if did == "step" and made == first else did]
                words = words.format(rank=victim, host=re.escape(socket.gethostname()))
                if not re.search(words, self._last_words(rank)):
                    self.fail(f"{name}: rank {rank} says {self._log(rank)}")
        if max(board.get(rank)[1] for rank in range(setting.ranks)) > LAST_STEP - 100:
            _clear(self._folder)

    def come_to_the_end(self) -> None:
        """What the last kill has left goes on, under fewer ranks, as every run ahead of it did."""
        board = _board(self._folder)
        pids = self._server.ask(start_order(replace(self._setting, ranks=1)))["pids"]
        _await(lambda: board.get(0)[0] in ("step", "save", "done"))
        _await(lambda: board.get(0)[2] > 0)
        os.kill(pids[0], signal.SIGKILL)
        if self._server.ask(json.dumps({"wait": WAIT_S}))["codes"] != [-signal.SIGKILL]:
            self.fail(f"one process alone does not go on: {self._log(0)}")

    def figures(self) -> Iterator[Figure]:
        """Of all kills."""
        yield Figure("rank-loss", "kills", sum(self.where.values()), "kills")
        for where, kills in sorted(self.where.items()):
            yield Figure("rank-loss", f"kills_in_{where}", kills, "kills")
        yield Figure("rank-loss", "exception_median", statistics.median(self.heard), "s")
        yield Figure("rank-loss", "exception_max", max(self.heard), "s", target=HEARD_S)
        yield Figure("rank-loss", "end_of_process_max", max(self.ended), "s")

    def _look(self, name: str, rank: int, code: int | None, seconds: float) -> None:
        self.ended.append(seconds)
        if code is None:
            self.fail(f"{name}: rank {rank} hangs: {self._log(rank)}")
        elif code != 1 or self._log(rank).count("Traceback (most recent") < 1:
            self.fail(f"{name}: rank {rank} ended with {code}: {self._log(rank)}")

    def _log(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text()

    def _last_words(self, rank: int) -> str:
        """The exception that it ended with."""
        return ([line for line in self._log(rank).splitlines() if "Error" in line] or [""])[-1]


def _stop(
    context: Context, folder: Path, server: Child, fail: Callable[[str], None]
) -> Iterator[Figure]:
    """A rank is stopped, and goes on."""
    seconds = QUICK_STOPPED_S if context.quick else STOPPED_S
    board = _board(folder)
    _clear(folder)
    pids = server.ask(start_order(Setting(str(folder), ranks=2, every=10, last=60)))["pids"]
    _await(lambda: board.get(1)[1] >= 11)  # in a step, and not in a save
    os.kill(pids[1], signal.SIGSTOP)
    stopped, said = time.monotonic(), 0.0
    while time.monotonic() - stopped < seconds:
        time.sleep(0.02)
        if not said and "waiting for rank 1" in (folder / "rank-0.log").read_text():
            said = time.monotonic() - stopped
    if board.get(0)[0] == "done" or board.get(0)[3]:
        fail("rank 0 did not wait for rank 1, which was stopped")
    os.kill(pids[1], signal.SIGCONT)
    goes_on, step = time.monotonic(), board.get(0)[1]
    _await(lambda: board.get(0)[1] > step)
    yield Figure("rank-loss", "goes_on_behind_a_stop", time.monotonic() - goes_on, "s")
    if seconds > SAID_S:
        yield Figure("rank-loss", "stopped_rank_named", said or NEVER_S, "s", target=SAID_S + 2)
    codes = server.ask(json.dumps({"wait": WAIT_S}))["codes"]
    if codes != [0, 0]:
        fail(f"behind a stop ranks ended with {codes}: {(folder / 'rank-0.log').read_text()}")


def _give_up(folder: Path, server: Child, fail: Callable[[str], None]) -> Iterator[Figure]:
    """Likewise, and is not waited for."""
    board = _board(folder)
    _clear(folder)
    setting = Setting(str(folder), ranks=2, every=10, rank_timeout=TIMEOUT_S)
    pids = server.ask(start_order(setting))["pids"]
    _await(lambda: board.get(1)[1] >= 11)  # in a step, and not in a save
    os.kill(pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    _await(lambda: board.get(0)[3] > 0)
    raised = board.get(0)[3]
    seconds = raised - stopped if raised else NEVER_S
    yield Figure("rank-loss", "given_up", seconds, "s", target=TIMEOUT_S + HEARD_S)
    os.kill(pids[1], signal.SIGCONT)
    codes = server.ask(json.dumps({"wait": WAIT_S}))["codes"]
    texts = [(folder / f"rank-{rank}.log").read_text() for rank in range(2)]
    if codes != [1, 1] or "rank 1 has let this one wait" not in texts[0]:
        fail(f"a rank that was given up, and the other, ended with {codes}: {texts}")


def _board(folder: Path) -> Board:
    """As it is ahead of a run."""
    (folder / "board").unlink(missing_ok=True)
    return Board(folder)


def _clear(folder: Path) -> None:
    """A run begins anew."""
    for path in folder.iterdir():
        if path.name.startswith(CHECKPOINT):
            shutil.rmtree(path)
    assert (folder / DIGESTS).exists()


def _await(ready: Callable[[], bool]) -> None:
    """Returns when it is, or when it takes too long: what is looked at next will say so."""
    end = time.monotonic() + WAIT_S
    while not ready() and time.monotonic() < end:
        time.sleep(LOOK_S)
