"""How ranks end their sessions: by strata.unwrap(), or when Python collects a model, which each
does at a moment of its own; and what ends a call of all. What each does is in rank_ends.py;
rank_server.py starts them."""

import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import strata
from rank_server import Ranks
from strata._storage.together import _Waits
from test_ranks import same
from variants import thorough


@pytest.mark.parametrize("then", ["meets", "wraps"])
def test_who_collects_a_model_first_waits_for_nobody(ranks: Ranks, then: str) -> None:
    found = [outcome.value for outcome in ranks.start("rank_ends.drops", 2, then=then).wait()]
    assert same(found) == same(ranks.run("bits", 1))


def test_an_exception_behind_a_collection_ends_all(ranks: Ranks) -> None:
    """Also where the collected session waits for the others."""
    outcomes = ranks.start("rank_ends.drops", 2, then="raises").wait()
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "ArithmeticError" in outcomes[0].output


def test_who_has_ended_its_training_need_not_unwrap(ranks: Ranks) -> None:
    outcomes = ranks.start("rank_ends.unwraps_at_the_end", 2).wait()
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    same([outcome.value for outcome in outcomes])


def test_unwrap_says_for_whom_it_waits(ranks: Ranks) -> None:
    first, second = ranks.start("rank_ends.unwraps_late", 2).wait()
    assert same([first.value, second.value])
    assert "strata.unwrap() waits for rank 1 for" in first.output


def test_who_dies_in_unwrap_is_named_and_another_call_ends_it(ranks: Ranks) -> None:
    stayed, left = ranks.start("rank_ends.dies_in_unwrap", 2).wait()
    assert left.code == 3
    assert stayed.code == 0, stayed.output
    told, plain, ended = stayed.value
    assert re.match("StrataError: rank 1 has (failed or )?died", told), told
    assert plain
    assert ended


def test_beside_a_group_for_gpus_alone_there_is_one_for_what_ranks_say(ranks: Ranks) -> None:
    """As NCCL's is, which need not be built in here."""
    expected = same(ranks.run("bits", 1, steps=1))
    for backend in ("cuda:gloo", "cpu:gloo"):
        assert same(ranks.run("rank_ends.meets_by", 2, meet=False, backend=backend)) == expected


@pytest.mark.parametrize(("store", "told"), [("a file", 1), ("a port", 0)])
def test_a_store_that_a_killed_rank_may_spoil_is_named(ranks: Ranks, store: str, told: int) -> None:
    outcomes = ranks.start("rank_ends.wraps_over", 2, meet=False, store=store).wait()
    assert [outcome.code for outcome in outcomes] == [0, 0]
    assert "".join(outcome.output for outcome in outcomes).count("ranks meet over a file") == told


@pytest.mark.parametrize("stopped", [True, False])
def test_who_is_stopped_ahead_of_a_save_is_named(ranks: Ranks, stopped: bool) -> None:
    run = ranks.start("rank_ends.saves_beside_one_that_is_late", 2)
    run.await_mark("there")
    if stopped:
        run.kill(1, signal.SIGSTOP)
    said = "rank 1 for 1 s: it is stopped" if stopped else "other ranks for 1 s: every rank has to"
    run.await_words(f"strata.save() waits for {said}")
    run.kill(1, signal.SIGCONT)
    (run.folder / "go").touch()
    assert [outcome.code for outcome in run.wait()] == [0, 0]


def test_who_has_ended_its_training_is_named_in_a_save(ranks: Ranks) -> None:
    said = ranks.run("rank_ends.saves_without_one_that_has_ended", 3)
    assert said[0].startswith("rank 1 has ended its training without strata.save()"), said
    assert same([said[0], *said[2:]])


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["save", "step"], "rank 1 has gone on without strata.save(), which rank 0 is in"),
        (["load", "step"], "rank 1 has gone on without strata.load(), which rank 0 is in"),
        (["unwrap", "step"], "rank 1 has gone on without strata.unwrap(), which rank 0 is in"),
        (["save", "load"], "rank 1 is in strata.load() and rank 0 in strata.save()"),
        (["save", "unwrap"], "rank 1 is in strata.unwrap() and rank 0 in strata.save()"),
        (["load", "unwrap"], "rank 1 is in strata.unwrap() and rank 0 in strata.load()"),
    ],
)
def test_calls_that_cannot_meet_are_refused(ranks: Ranks, calls: list[str], words: str) -> None:
    """At once: else each would wait for the other for half an hour."""
    outcomes = ranks.start("rank_ends.calls_apart", 2, calls=calls).wait()
    assert words in (outcomes[0].value or outcomes[0].output)


def test_last_words_come_before_the_end() -> None:
    """The core hears that a rank has ended before torch has what that one said last: why."""

    def ended() -> None:
        raise strata.StrataError("rank 1 has ended")

    state: Any = SimpleNamespace(session=SimpleNamespace(awaited_rank=ended))
    waits, begin = _Waits(state, "strata.load()", 10.0), time.monotonic()
    waits._await(lambda: time.monotonic() - begin > 0.05)
    with pytest.raises(strata.StrataError):
        waits._await(lambda: False)


def test_unwrap_needs_no_group_of_torch(ranks: Ranks) -> None:
    assert same(ranks.run("rank_ends.unwraps_behind_torch", 2)) == same(
        ranks.run("bits", 2, steps=1)
    )


@pytest.mark.parametrize("update", ["on_step", thorough("lock-free:0")])
def test_a_load_drops_gradients_of_some_ranks(ranks: Ranks, update: str) -> None:
    found = ranks.run("rank_ends.loads_over_gradients_of_one", 2, update=update)
    assert same(found) == same(ranks.run("bits", 2, steps=2))
