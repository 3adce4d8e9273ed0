"""One run at a time is in a folder of ssd_path=, whatever the numbers of ranks, and nothing of a
run that was killed is there when the next one has begun. rank_server.py starts them."""

import time
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Ranks, Run
from test_ranks import same
from variants import thorough


def begin(ranks: Ranks, who: int | str, *folders: Path) -> Run:
    """A run that trains there without end."""
    run = ranks.start("at_moment", who, where="step", victim=0, **on(who, *folders))
    run.await_mark("there")
    return run


def on(who: int | str, *folders: Path) -> dict[str, Any]:
    """Host memory is too small: a process that is alone locks what it needs."""
    return {
        "memory": {"device": "1MiB", "host": "2MiB" if who == 1 else "10MiB", "ssd": "1GiB"},
        "page_size": "64KiB",
        "ssd_path": [str(path) for path in folders],
    }


def once(ranks: Ranks, who: int | str, *folders: Path) -> list[Outcome]:
    """A run of one step."""
    return ranks.start("bits", who, steps=1, **on(who, *folders)).wait()


def works(outcomes: list[Outcome]) -> None:
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    same([outcome.value for outcome in outcomes])


def kill(run: Run) -> None:
    for rank in range(len(run.pids)):
        run.kill(rank)
    run.wait()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refused(outcomes: list[Outcome], folder: Path, by: Run) -> None:
    """All of them, with the name of the folder and of a process that is there."""
    for outcome in outcomes:
        assert outcome.code == 1, outcome.output
        last = outcome.output.splitlines()[-1]
        assert f"the SSD path {folder} is in use by process " in last, outcome.output
        assert int(last.split("by process ")[1].split()[0]) in by.pids, outcome.output


@pytest.mark.parametrize("who", [1, 2, thorough("ab")])
@pytest.mark.parametrize("other", [1, 2, thorough(3), thorough("ab")])
def test_another_run_is_refused_by_name(
    ranks: Ranks, tmp_path: Path, who: int | str, other: int | str
) -> None:
    first = begin(ranks, who, tmp_path)
    refused(once(ranks, other, tmp_path), tmp_path, first)
    assert first.codes() is None
    kill(first)
    works(once(ranks, other, tmp_path))


def test_of_several_folders_one_may_be_in_use(ranks: Ranks, tmp_path: Path) -> None:
    ours, shared, theirs = folders = [tmp_path / name for name in ("ours", "shared", "theirs")]
    for folder in folders:
        folder.mkdir()
    first = begin(ranks, 2, ours, shared)
    refused(once(ranks, 2, theirs, shared), shared, first)
    assert names(theirs) == set()
    works(once(ranks, 2, theirs))
    kill(first)


def test_of_runs_that_begin_together_one_stays(ranks: Ranks, tmp_path: Path) -> None:
    how = {"where": "step", "victim": 0, **on(2, tmp_path)}
    runs = [ranks.start("at_moment", 2, **how) for _ in range(2)]
    end = time.monotonic() + 300.0
    while not (over := [run for run in runs if run.codes() is not None]):
        assert time.monotonic() < end, "both train"
        time.sleep(0.01)
    (ended,) = over
    (left,) = (run for run in runs if run is not ended)
    refused(ended.wait(), tmp_path, left)
    left.await_mark("there")
    kill(left)


def test_models_of_the_same_ranks_share_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    same(ranks.run("trains_two", 2, **on(2, tmp_path)))
    assert names(tmp_path) == {"rank-0", "rank-1"}


def test_ranks_may_have_folders_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """One that is in use is named on all ranks."""
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    how = {"root": str(tmp_path), "memory": on(2)["memory"]}
    same(ranks.run("folders_apart", 2, **how))
    first = begin(ranks, 1, tmp_path / "1")
    outcomes = ranks.start("folders_apart", 2, **how).wait()
    refused(outcomes, tmp_path / "1", first)
    assert "refused on rank 1" in outcomes[0].output
    kill(first)


@pytest.mark.parametrize("other", [1, 2])
def test_the_next_run_removes_what_killed_ranks_left(
    ranks: Ranks, tmp_path: Path, other: int
) -> None:
    kill(begin(ranks, 3, tmp_path))
    left = tmp_path / "rank-2" / f"strata-{7:016x}.pages"  # as where files need names
    left.write_text("pages")
    left.with_name("strata.lock").write_text(f"999999999 pid:[1]\n{left.name}\n")
    run = begin(ranks, other, tmp_path)
    own = {"rank-0", "rank-1"} if other == 2 else set()
    assert names(tmp_path) == {"strata.lock", *own}
    kill(run)
    works(once(ranks, 1, tmp_path))
    assert names(tmp_path) == set()


def test_what_is_no_lock_file_is_refused_and_stays(ranks: Ranks, tmp_path: Path) -> None:
    letter, lock = tmp_path / "letter", tmp_path / "ssd" / "strata.lock"
    letter.write_text("dear")
    lock.parent.mkdir()
    for link in (True, False):
        lock.symlink_to(letter) if link else lock.write_text("dear")
        why = "is a link" if link else "is a file of somebody else's"
        for outcome in once(ranks, 2, lock.parent):
            assert outcome.code == 1, outcome.output
            assert f"{lock} {why}" in outcome.output.splitlines()[-1], outcome.output
        assert lock.read_text() == letter.read_text() == "dear"
        lock.unlink()


def test_other_files_there_stay(ranks: Ranks, tmp_path: Path) -> None:
    for kept in ("rank-7/mine", "rank-x/mine", "rank-3"):
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("kept")
    before = names(tmp_path)
    for count in (2, 1):
        works(once(ranks, count, tmp_path))
    assert names(tmp_path) == before
    assert (tmp_path / "rank-7/mine").read_text() == "kept"
