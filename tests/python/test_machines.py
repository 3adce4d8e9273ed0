"""Ranks of several machines, which share no memory: here they are processes of one host that were
told so. Each machine holds all of the state, and gradients cross. What each does is in
rank_scenarios.py; rank_server.py starts them."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from test_ranks import CASES, QUICK, all_say, same
from variants import thorough

EACH = "ab"  # by rank: its machine
TWICE = "abab"  # so each machine has the micro-batches that it has with one rank
LOST_S = 10.0  # in which all ranks know that a machine is lost


@pytest.fixture(autouse=True)
def leaves_nothing(ranks: Ranks) -> Iterator[None]:
    """No folder in which ranks have met is there when all have gone."""
    yield
    assert not list(ranks.temporary.glob("strata-ranks-*"))


@pytest.mark.parametrize("case", [case if case == QUICK[0] else thorough(case) for case in CASES])
def test_bits_are_those_of_the_number_of_machines(ranks: Ranks, case: str) -> None:
    expected = same(ranks.run("bits", EACH, **CASES[case]))
    assert same(ranks.run("bits", TWICE, **CASES[case])) == expected


@pytest.mark.parametrize("scenario", ["scales", thorough("drops")])
def test_gradients_answer_for_all_machines(ranks: Ranks, scenario: str) -> None:
    expected = same(ranks.run(f"rank_gradients.{scenario}", EACH))
    assert same(ranks.run(f"rank_gradients.{scenario}", TWICE)) == expected


def test_gradients_may_be_read_between_backward_passes(ranks: Ranks) -> None:
    """What was added up by then stays a sum of its own, so the bits are those of such a loop."""
    same(ranks.run("rank_gradients.clips", TWICE))


def test_ranks_that_see_other_folders_are_of_other_machines(ranks: Ranks) -> None:
    """As in containers, whose processes may be of one user and one list."""
    same(ranks.run("rank_promises.sees_no_folder", 4))


@pytest.mark.parametrize("update", ["in_backward", "lock-free:0"])
def test_other_modes_of_updates_are_refused(ranks: Ranks, update: str) -> None:
    for (said,) in ranks.run("rank_promises.wraps_apart", EACH, update=update):
        assert re.search(r'several machines update at step\(\): give update="on_step"', said), said


def test_a_checkpoint_goes_on_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    """Each machine writes all of it."""
    path = str(tmp_path / "{machine}")
    found = ranks.run("rank_saves.saves", EACH, path=path)
    expected = same([one["hash"] for one in found])
    for who in (EACH, TWICE):
        for one in ranks.run("rank_saves.loads", who, path=path):
            assert one["hash"] == expected


def test_a_machine_is_what_shares_memory(ranks: Ranks) -> None:
    assert same(ranks.run("rank_promises.machines", 2)) == []
    assert same(ranks.run("rank_promises.machines", "aab")) == ["a", "a", "b"]


def test_a_machine_whose_rank_is_killed_is_named_by_all(ranks: Ranks) -> None:
    run = ranks.start("at_moment", TWICE, where="step", victim=1)
    run.await_mark("there")
    time.sleep(0.3)  # the others come to where they wait for it
    killed = run.kill(1)
    outcomes: list[Any] = run.wait()
    for rank in (0, 2):
        all_say([outcomes[rank]], r"machine b (is lost|has ended)|rank \d has failed or died")
        assert outcomes[rank].seconds - killed < 2 * LOST_S
    all_say([outcomes[3]], "rank 0 has died")
