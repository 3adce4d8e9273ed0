"""What ranks of one machine promise: what reads a model needs no other rank's call, and whoever
ends, stops or is interrupted leaves nothing behind. What each does is in rank_promises.py;
rank_server.py starts them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from test_ranks import HOME, all_say, same

pytestmark = pytest.mark.thorough

SOON_S = 30.0  # half of what ranks wait for each other where they meet; the bench times it
SSD = {"memory": {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"}, "page_size": "64KiB"}


@pytest.fixture(autouse=True)
def leaves_nothing(ranks: Ranks) -> Iterator[None]:
    """No folder in which ranks have met is there when all have gone, nor anything in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not list(ranks.temporary.glob("strata-ranks-*"))
    assert not {name for name in os.listdir("/dev/shm") if "strata" in name} - before


# What reads a model -------------------------------------------------------------------------------


@pytest.mark.parametrize("only_first", [False, True])
def test_all_that_reads_a_model_may_run_on_all_ranks_or_on_one(
    ranks: Ranks, only_first: bool
) -> None:
    expected = ranks.run("rank_promises.shows", 1, only_first=only_first)[0]
    first, second = ranks.run("rank_promises.shows", 2, only_first=only_first)
    assert first == expected
    assert second == ({"behind": expected["behind"]} if only_first else expected)


def test_a_machine_reads_each_weight_once(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ranks.run("rank_promises.writes_weights", 1, path=str(path))
    size = path.stat().st_size
    expected = ranks.run("rank_promises.reads_weights", 1, path=str(path))[0]
    found = ranks.run("rank_promises.reads_weights", 2, path=str(path))
    assert [of["hash"] for of in found] == [expected["hash"]] * 2
    assert expected["looked"] >= size * 0.99
    assert sum(of["looked"] for of in found) <= size * 1.1, found


@pytest.mark.parametrize("count", [2, 4])
def test_a_machine_reads_each_page_once(ranks: Ranks, count: int) -> None:
    """However many of its ranks compute with it."""
    how = {"memory": {"device": "4MiB", "host": "8MiB", "ssd": "1GiB"}, "page_size": "64KiB"}
    (expected,) = ranks.run("rank_promises.reads_pages", 1, steps=4, **how)
    assert expected > 0
    assert sum(ranks.run("rank_promises.reads_pages", count, steps=4, **how)) < 1.1 * expected


# Steps --------------------------------------------------------------------------------------------


def test_steps_that_are_not_finite_are_left_out_by_all(ranks: Ranks) -> None:
    expected = ranks.run("rank_promises.skips", 1)[0]
    assert expected[0] == 2
    for count in (2, 4):
        assert same(ranks.run("rank_promises.skips", count)) == expected


def test_gradients_may_be_summed(ranks: Ranks) -> None:
    """Also where the ranks have unequal numbers of micro-batches."""
    expected = ranks.run("rank_promises.sums", 1)[0]
    for count in (2, 3):
        assert same(ranks.run("rank_promises.sums", count)) == expected


# Ends, stops and interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ahead", "memory", "values"])
def test_who_ends_before_all_train_is_not_waited_for(ranks: Ranks, where: str) -> None:
    run = ranks.start("rank_promises.ends_ahead", 2, where=where)
    left, ended = run.wait()
    assert ended.code == 3
    named = "another rank" if where == "ahead" else "rank 1"
    all_say([left], f"{named} .*ended.* its own output says why")
    assert left.seconds - ended.seconds < SOON_S


def test_only_rank_timeout_ends_a_wait(ranks: Ranks) -> None:
    run = ranks.start("rank_promises.stays", 2, rank_timeout=1.0)
    run.await_mark("there")
    stopped = run.kill(1, signal.SIGSTOP)
    while not (run.folder / "rank-0.log").read_text().count("StrataError"):
        time.sleep(0.02)
        assert time.monotonic() - run._began < stopped + 60
    run.kill(1, signal.SIGCONT)
    waiting, late = run.wait()
    all_say([waiting], r"rank 1 has let this one wait for 1(\.\d+)? s, .*rank_timeout= allows")
    all_say(
        [late], "this rank let rank 0 wait for longer than rank_timeout= allows|rank 0 has died"
    )


def test_who_is_slow_and_comes_is_not_given_up(ranks: Ranks) -> None:
    options: dict[str, Any] = {"steps": 8, "pause": 0.4, "rank_timeout": 1.0}
    assert same(ranks.run("rank_promises.is_slow", 2, **options)) == same(
        ranks.run("rank_promises.is_slow", 2, steps=8, pause=0.0)
    )


@pytest.mark.parametrize("who", [[0, 1], [1]])
def test_ctrl_c_ends_all_and_leaves_nothing(ranks: Ranks, tmp_path: Path, who: list[int]) -> None:
    run = ranks.start("rank_promises.is_interrupted", 2, ssd_path=str(tmp_path), **SSD)
    run.await_mark("there")
    time.sleep(0.3)  # the other one waits for it, inside its step
    for rank in who:
        sent = run.kill(rank, signal.SIGINT)
    outcomes = run.wait()
    assert "KeyboardInterrupt" in outcomes[1].output
    assert outcomes[0].code != 0
    if who == [1]:
        all_say([outcomes[0]], "rank 1 has (failed or )?died|rank 1 has failed")
    for outcome in outcomes:
        assert outcome.seconds - sent < SOON_S, outcome.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# torchrun -----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {home!r})
import rank_loops as loops, strata, torch
from pathlib import Path
from torch import distributed
torch.set_num_threads(1)
distributed.init_process_group("gloo")
run = loops.Rank(distributed.get_rank(), distributed.get_world_size(), Path())
model, optimizer = loops.wrap(run, loops.make_model())
path = Path("checkpoint")
done = strata.load(model, path)["step"] if path.exists() else 0
first = not path.exists()
for step in range(done, 8):
    loops.train(run, model, optimizer, 1, first=step)
    strata.save(model, path, extra={{"step": step + 1}})
    if first and step == 4 and run.rank == run.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
# In one piece: torchrun starts Python unbuffered, and both ranks print here.
os.write(1, f"found {{done}} {{run.ranks}} {{loops.hash_of(model)}}\\n".encode())
"""


OF_TORCHRUN = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as docs/how-to/ranks.md says
}


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(home=str(HOME)))
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | OF_TORCHRUN,
    )  # fmt: skip


def found_by(process: subprocess.Popen[str]) -> list[list[str]]:
    """What ranks have printed at the end; Gloo prints beside them."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [list(found) for found in re.findall(r"found (\d+) (\d+) (\w+)", output)]


@pytest.mark.thorough
def test_torchrun_starts_again_from_the_newest_checkpoint(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = same(ranks.run("bits", 2, steps=8))
    process = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    found = found_by(process)
    assert found == [["5", "2", expected]] * 2
    # With fewer ranks: another start does it, too.
    assert found_by(torchrun(tmp_path, "--standalone", "--nproc-per-node", "1")) == [
        ["8", "1", expected]
    ]
    monkeypatch.setitem(OF_TORCHRUN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    shared = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    assert "pytorch issue 135712" in shared.communicate(timeout=300)[1].lower()
