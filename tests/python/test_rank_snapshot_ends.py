"""Ranks that are killed while they take snapshots: training goes on from the newest one that is
whole. What each does is in rank_snapshots.py; rank_server.py starts them."""

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.series import snapshots_of
from test_rank_saves import each
from test_rank_snapshots import links, on_drive
from test_ranks import all_say, same
from variants import thorough

SEED = 11
STEPS = 6  # of a run under fire


@pytest.fixture
def ssd(tmp_path: Path) -> dict[str, Any]:
    """Options: state rests on a drive of this test's."""
    return on_drive(tmp_path / "drive")


@pytest.fixture(scope="module")
def hashes(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By step, from 2 on, of a run that nothing has interrupted."""
    options = on_drive(tmp_path_factory.mktemp("whole") / "drive")
    return list(same(ranks.run("rank_snapshots.hashes_by_step", 2, steps=STEPS + 1, **options)))


def kill_in_a_commit(ranks: Ranks, who: int | str, where: str, victim: int, **options: Any) -> None:
    """One of two ranks stays there in its next snapshot, and is killed; the other one says so."""
    run = ranks.start(
        "rank_snapshots.under_fire", who, steps=1, victim=victim, where=where, **options
    )
    run.await_mark("there")
    time.sleep(0.1)  # the other one comes to where it waits for it
    run.kill(victim)
    all_say([run.wait()[1 - victim]], f"rank {victim} has (failed or )?died")


def kill_at_any_moment(
    ranks: Ranks, who: int | str, victim: int, chosen: random.Random, **options: Any
) -> None:
    """One of two ranks, behind its first snapshot."""
    run = ranks.start("rank_snapshots.under_fire", who, steps=STEPS, victim=victim, **options)
    run.await_mark("there")
    time.sleep(chosen.uniform(0.0, 0.6))
    with contextlib.suppress(ProcessLookupError):  # it was at the end already
        run.kill(victim)
    outcome = run.wait()[1 - victim]
    if outcome.code != 0:  # else this one was
        all_say([outcome], f"rank {victim} has (failed or )?died")


def chosen_for(number: int) -> random.Random:
    """Seeded: STRATA_SEED replays others."""
    return random.Random(int(os.environ.get("STRATA_SEED", SEED)) * 100 + number)


def step_that_trains_on(ranks: Ranks, who: int | str, hashes: list[str], **options: Any) -> int:
    """Of the newest snapshot, which has the bits of its step; training goes on to those of the next
    one."""
    found = ranks.run("rank_snapshots.trains_on", who, **options)
    step = int(same(each(found, "step")))
    assert same(each(found, "loaded")) == hashes[step - 2]
    assert same(each(found, "trained")) == hashes[step - 1]
    return step


def check_what_is_left(
    ranks: Ranks, series: Path, ssd: dict[str, Any], hashes: list[str], count: int
) -> int:
    """The newest snapshot has the bits of its step, training goes on to those of the next one, and
    nothing else is left. Returns the step."""
    newest = snapshots_of(series)[-1].name
    step = step_that_trains_on(ranks, count, hashes, series=str(series), **ssd)
    assert newest == f"step-{step:06d}"
    left = {read_manifest(folder)["id"] for folder in snapshots_of(series)}
    assert {link.name[:16] for link in links(ssd)} == left
    names = {entry.name for entry in series.iterdir()}
    assert names == {folder.name for folder in snapshots_of(series)}
    return step


@pytest.mark.parametrize(
    ("where", "victim", "step"),
    [
        ("clean", 1, 2),
        ("links", 0, 2),
        ("links", 1, 2),
        ("linked", 1, 2),
        ("part", 1, 2),
        ("manifest", 0, 2),
        ("newest", 0, 2),
        ("finish", 0, 3),
        ("finish", 1, 3),
        ("rotate", 0, 3),
    ],
)
@pytest.mark.thorough
def test_a_rank_is_killed_in_a_commit(
    ranks: Ranks,
    tmp_path: Path,
    ssd: dict[str, Any],
    hashes: list[str],
    where: str,
    victim: int,
    step: int,
) -> None:
    series = tmp_path / "run"
    kill_in_a_commit(ranks, 2, where, victim, series=str(series), **ssd)
    assert check_what_is_left(ranks, series, ssd, hashes, 2) == step


@pytest.mark.parametrize("count", [1, thorough(4)])
def test_other_ranks_remove_what_a_killed_run_left(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], hashes: list[str], count: int
) -> None:
    series = tmp_path / "run"
    kill_in_a_commit(ranks, 2, "linked", 1, series=str(series), **ssd)
    assert check_what_is_left(ranks, series, ssd, hashes, count) == 2


@pytest.mark.parametrize("number", range(12))
@pytest.mark.thorough
def test_a_rank_is_killed_at_any_moment(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], hashes: list[str], number: int
) -> None:
    chosen = chosen_for(number)
    victim, count = chosen.randrange(2), chosen.choice([1, 2, 2])
    series = tmp_path / "run"
    kill_at_any_moment(ranks, 2, victim, chosen, series=str(series), **ssd)
    check_what_is_left(ranks, series, ssd, hashes, count)
