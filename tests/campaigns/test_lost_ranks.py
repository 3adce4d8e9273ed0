"""Ranks of this machine, one of which is killed by SIGKILL at a random moment, while they meet,
load, train and save. Every other one must end within two seconds, with one exception that names the
rank, its host, and where it was; the next run, of any number of ranks, goes on from the newest
checkpoint to the bits of a run that nobody interrupted. Then one is stopped by SIGSTOP: the others
wait, say for which rank, and go on when it does; or end, where `rank_timeout` is given.

Kill n depends on the seed, on n and on the machine's clock. STRATA_RANK_KILLS=200 is a campaign,
and STRATA_STOP_SECONDS=60.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from campaign import FIRST, SEED, Board, tries
from lost_ranks import CHECKPOINT, LAST_STEP, Setting
from rank_server import Outcome, Ranks, Run

KILLS_PER_RUN = 10  # then a new run begins, with other settings
HEARD_S = 2.0  # in which all others have raised
WAIT_S = 60.0  # for ranks to come to where one is killed
LOOK_S = 0.0005
SAID_S = 10.0  # after which the log names the rank that is waited for
TIMEOUT_S = 2.0  # rank_timeout
# What the victim does, and at most so many seconds after it began to.
MOMENTS = [
    *(("wrap", 0.15), ("load", 0.05), ("step", 0.05), ("step", 0.3), ("step", 0.6)),
    *(("save", 0.01), ("save", 0.03)),
]
DIED = rf"rank {{rank}} has (failed or )?died, on {re.escape(socket.gethostname())}"
UNIT = r" in step \d+ since strata.wrap\(\), last in the (forward|backward) of "
# What others say of the victim, by what it did: before its first forward it was in no unit, and
# before all have met nobody knows more of it than torch.distributed.
WORDS = {
    "meet": "",
    "wrap": r"(rank {rank}|another rank) ",
    "load": DIED,
    "step": DIED + UNIT,
    "save": DIED + UNIT,
}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digests of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run("lost_ranks.writes_digests", 1, folder=str(folder))
    return folder


@pytest.fixture
def folder(whole: Path) -> Path:
    """The same, where a run may begin."""
    shutil.rmtree(whole / CHECKPOINT, ignore_errors=True)
    return whole


def start(ranks: Ranks, count: int, setting: Setting) -> tuple[Run, list[Board]]:
    """Starts ranks that train, and reads their boards."""
    alone = {} if count == 1 else {"meet": False}  # ranks meet where the board says so
    run = ranks.start("lost_ranks.trains", count, **alone, **asdict(setting))
    return run, [Board(run.folder / f"board-{rank}") for rank in range(count)]


def await_(ready: Callable[[], bool]) -> None:
    """Returns when it is, or when it takes too long: what is looked at next will say so."""
    end = time.monotonic() + WAIT_S
    while not ready() and time.monotonic() < end:
        time.sleep(LOOK_S)


def last_words(outcome: Outcome) -> str:
    """The exception that a rank ended with."""
    return ([line for line in outcome.output.splitlines() if "Error" in line] or [""])[-1]


def test_a_killed_rank_is_named_and_nothing_is_lost(ranks: Ranks, folder: Path) -> None:
    setting, where, heard = Setting(str(folder)), Counter[str](), []
    for number in range(FIRST, FIRST + tries("STRATA_RANK_KILLS", 12)):
        if number % KILLS_PER_RUN == 0 or number == FIRST:
            choice = random.Random(f"{SEED} {number // KILLS_PER_RUN}")
            shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
            setting = replace(
                setting,
                place=choice.choice(["host", "ssd"]),
                page_size=choice.choice(["64KiB", "128KiB"]),
                every=choice.choice([1, 2, 5]),
            )
        did, seconds = kill(ranks, number, setting)
        where[did] += 1
        heard += seconds
    print(f"kills: {dict(where)}; others raised within {max(heard):.2f} s")
    assert max(heard) <= HEARD_S
    # What the last kill has left goes on by one process alone.
    run, (board,) = start(ranks, 1, setting)
    await_(lambda: board.doing == "done" or board["complete"] > 0)
    with contextlib.suppress(ProcessLookupError):
        run.kill(0)
    (outcome,) = run.wait()
    assert outcome.code == -signal.SIGKILL, f"{outcome.code}: {outcome.output}"


def kill(ranks: Ranks, number: int, setting: Setting) -> tuple[str, list[float]]:
    """Kills one rank. Returns what it did, and the seconds until each other one had raised."""
    choice = random.Random(f"{SEED} kill {number}")
    count = choice.choice([2, 2, 2, 3, 3, 4])
    victim = choice.randrange(count)
    doing, most = choice.choice(MOMENTS)
    run, boards = start(ranks, count, setting)
    board = boards[victim]
    await_(lambda: board.doing in (doing, "done"))
    time.sleep(choice.random() * most)
    did, in_first_step = board.doing, board["step"] == board["first"]
    killed = time.monotonic()
    run.kill(victim)
    outcomes = run.wait()
    name = f"kill {number} of rank {victim} of {count} in {did}"
    assert outcomes[victim].code == -signal.SIGKILL, f"{name}: {outcomes[victim].output}"
    if did == "done" or max(board["step"] for board in boards) > LAST_STEP - 100:
        shutil.rmtree(Path(setting.folder) / CHECKPOINT)
    if did == "done":
        return did, [0.0]
    # In its first step it may not have come to a unit.
    words = WORDS["load" if did == "step" and in_first_step else did].format(rank=victim)
    heard = []
    for rank in set(range(count)) - {victim}:
        outcome = outcomes[rank]
        assert outcome.code == 1, f"{name}: rank {rank}: {outcome.output}"
        assert re.search(words, last_words(outcome)), f"{name}: rank {rank}: {outcome.output}"
        heard.append((boards[rank]["raised"] or killed + outcome.seconds) - killed)
    return did, heard


def stop_one_of_two(ranks: Ranks, setting: Setting) -> tuple[Run, list[Board]]:
    """Stops rank 1 in a step, and not in a save."""
    run, boards = start(ranks, 2, setting)
    await_(lambda: boards[1]["step"] >= 11)
    run.kill(1, signal.SIGSTOP)
    return run, boards


def test_a_stopped_rank_is_waited_for_and_named(ranks: Ranks, folder: Path) -> None:
    seconds = float(os.environ.get("STRATA_STOP_SECONDS", "12.5"))
    run, boards = stop_one_of_two(ranks, Setting(str(folder), every=10, last=60))
    stopped, said = time.monotonic(), 0.0
    while time.monotonic() - stopped < seconds:
        time.sleep(0.02)
        if not said and "waiting for rank 1" in run.outputs():
            said = time.monotonic() - stopped
    assert boards[0].doing != "done"
    assert not boards[0]["raised"], run.outputs()
    assert 0 < said <= SAID_S + 2
    run.kill(1, signal.SIGCONT)
    assert [outcome.code for outcome in run.wait()] == [0, 0], run.outputs()


def test_a_stopped_rank_is_given_up_where_that_is_asked_for(ranks: Ranks, folder: Path) -> None:
    run, boards = stop_one_of_two(ranks, Setting(str(folder), every=10, rank_timeout=TIMEOUT_S))
    stopped = time.monotonic()
    await_(lambda: boards[0]["raised"] > 0)
    assert 0 < boards[0]["raised"] - stopped <= TIMEOUT_S + HEARD_S
    run.kill(1, signal.SIGCONT)
    outcomes = run.wait()
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "rank 1 has let this one wait" in outcomes[0].output
