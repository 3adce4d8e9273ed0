"""Ranks of one machine in every mode of updates, with moments in 8 bits, and with an optimizer that
has no kernel. What each rank does is in rank_modes.py; rank_server.py starts them."""

import re
from typing import Any

import pytest
from rank_server import Outcome, Ranks
from test_ranks import ENDED_S

pytestmark = pytest.mark.thorough  # the suites rank_modes and rank_simulator show the same

SSD: dict[str, Any] = {
    "dtype": "bfloat16",
    "ssd_path": "own",
    "page_size": "64KiB",
    "memory": {"device": "2MiB", "host": "14MiB", "ssd": "1GiB"},
    "width": 256,  # of 25 MiB in all
}
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "units clipped": {"max_unit_norm": 0.02},
    "ssd": SSD,
}
MODES = ("in_backward", "lock-free:0")
COUNTS = (2, 3)


def same(values: list[Any]) -> Any:
    """The one value of all ranks."""
    assert all(value == values[0] for value in values), values
    return values[0]


def expect_bits_of_one(ranks: Ranks, scenario: str, update: str, **options: Any) -> None:
    """Each number of ranks ends with what one process has that updates at step()."""
    for count in COUNTS:
        expected = same(ranks.run(f"rank_modes.{scenario}", 1, of=count, **options))
        found = ranks.run(f"rank_modes.{scenario}", count, of=count, update=update, **options)
        assert same(found) == expected, count


def all_say(outcomes: list[Outcome], pattern: str) -> None:
    """Every one of them ended with a StrataError of these words."""
    for outcome in outcomes:
        assert outcome.code == 1, outcome.output
        last = [line for line in outcome.output.splitlines() if "StrataError" in line][-1]
        assert re.search(pattern, last), outcome.output


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_one_process_that_updates_at_step(
    ranks: Ranks, update: str, case: str
) -> None:
    expect_bits_of_one(ranks, "bits", update, **CASES[case])


def test_a_norm_of_all_gradients_is_clipped_without_staleness(ranks: Ranks) -> None:
    expect_bits_of_one(ranks, "bits", "lock-free:0", max_grad_norm=0.05)


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("scenario", ["experts", "leaves_out"])
def test_what_a_rank_leaves_out_is_no_gradient(ranks: Ranks, update: str, scenario: str) -> None:
    expect_bits_of_one(ranks, scenario, update)


@pytest.mark.parametrize("case", ["bfloat16", "ssd"])
def test_moments_in_8_bits(ranks: Ranks, case: str) -> None:
    expect_bits_of_one(ranks, "bits", "on_step", state_dtype="8bit", **CASES[case])
    expect_bits_of_one(ranks, "bits", "in_backward", state_dtype="8bit", **CASES[case])


@pytest.mark.parametrize("optimizer", ["NAdam", "RMSprop"])
def test_an_optimizer_without_a_kernel(ranks: Ranks, optimizer: str) -> None:
    for update in ("on_step", *MODES):
        expect_bits_of_one(ranks, "bits", update, optimizer=optimizer, dtype="bfloat16")


@pytest.mark.parametrize("case", ["float32", "ssd"])
def test_updates_may_lag_as_far_as_declared(ranks: Ranks, case: str) -> None:
    for count in COUNTS:
        found = ranks.run("rank_modes.lags", count, of=count, update="lock-free:2", **CASES[case])
        same([one["hash"] for one in found])
        same([one["evaluated"] for one in found])
        for one in found:
            assert all(len(unit) == 3 for unit in one["seen"])
            assert all(sum(unit) > 0 for unit in one["seen"])


@pytest.mark.parametrize("update", ["on_step", "in_backward", "lock-free:1"])
@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
def test_other_learning_rates_are_named(ranks: Ranks, update: str, optimizer: str) -> None:
    options = {"update": update, "optimizer": optimizer}
    all_say(
        ranks.start("rank_modes.differs", 2, of=2, **options).wait(),
        "ask different things of this step",
    )


@pytest.mark.parametrize(
    ("update", "what", "words"),
    [
        ("in_backward", "again", "a forward between backward\\(\\) and step\\(\\)"),
        ("in_backward", "drops", "zero_grad\\(\\) between backward\\(\\) and step\\(\\)"),
        ("in_backward", "values", "update='in_backward' may begin its update at any time"),
        ("lock-free:1", "drops", "cannot be dropped where updates may lag"),
        ("lock-free:1", "reads", "call step\\(\\) first"),
        ("lock-free:1", "values", "update='lock_free' may begin its update at any time"),
    ],
)
def test_what_a_mode_cannot_do_is_refused(ranks: Ranks, update: str, what: str, words: str) -> None:
    for said in ranks.run("rank_modes.refuses", 2, of=2, update=update, what=what):
        assert re.search(words, said), said


@pytest.mark.parametrize("update", ["in_backward", "lock-free:1"])
@pytest.mark.parametrize("where", ["backward", "step"])
def test_who_is_killed_is_named_by_all(ranks: Ranks, update: str, where: str) -> None:
    run = ranks.start("rank_modes.at_moment", 3, of=3, where=where, victim=1, update=update)
    run.await_mark("there")
    killed = run.kill(1)
    outcomes = run.wait()
    all_say([outcomes[0], outcomes[2]], "rank 1 has (failed or )?died")
    for outcome in outcomes:
        assert outcome.seconds - killed < ENDED_S
