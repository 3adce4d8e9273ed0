"""Ranks of one machine: processes that train one model together. What each does is in
rank_scenarios.py; rank_server.py starts them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Ranks
from variants import thorough

HOME = Path(__file__).parent
# An interpreter takes a while to end, where others compute; campaigns/test_lost_ranks.py times
# how soon a rank knows that another one has died.
ENDED_S = 30.0
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "clipped": {"dtype": "bfloat16", "max_grad_norm": 0.05},
    "units clipped": {"max_unit_norm": 0.02},
    "pages": {"page_size": "256KiB"},
    "ssd": {
        "dtype": "bfloat16",
        "ssd_path": "own",
        "page_size": "64KiB",
        "memory": {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"},
    },
}


@pytest.fixture(autouse=True)
def leaves_nothing(ranks: Ranks) -> Iterator[None]:
    """No folder in which ranks have met is there when all have gone."""
    yield
    assert not list(ranks.temporary.glob("strata-ranks-*"))


def same(values: list[Any]) -> Any:
    """The one value of all ranks."""
    assert all(value == values[0] for value in values), values
    return values[0]


def all_say(outcomes: list[Outcome], pattern: str) -> None:
    """Every one of them ended with a StrataError of these words."""
    for outcome in outcomes:
        assert outcome.code == 1, outcome.output
        last = [line for line in outcome.output.splitlines() if "StrataError" in line][-1]
        assert re.search(pattern, last), outcome.output


QUICK = ("ssd",)


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else thorough(case) for case in CASES],
)
def test_bits_do_not_depend_on_the_number_of_ranks(ranks: Ranks, case: str) -> None:
    expected = same(ranks.run("bits", 1, **CASES[case]))
    for count in (2, 4):
        assert same(ranks.run("bits", count, **CASES[case])) == expected


@pytest.mark.parametrize("update", ["on_step", thorough("in_backward")])
def test_nor_where_gradients_land_when_the_backward_is_over(ranks: Ranks, update: str) -> None:
    expected = same(ranks.run("bits", 1))
    for count in (2, 4):
        if update == "on_step" or count == 4:  # one backward a step
            assert same(ranks.run("lands_late", count, update=update)) == expected


@pytest.mark.parametrize("case", [thorough("float32"), "ssd"])
@pytest.mark.parametrize("form", ["nf4-double", thorough("nf4")])
def test_nor_where_a_base_rests_as_codes(ranks: Ranks, form: str, case: str) -> None:
    expected = same(ranks.run("codes", 1, form=form, **CASES[case]))
    assert expected != same(ranks.run("codes", 1, form="as-is", **CASES[case]))
    assert same(ranks.run("codes", 2, form=form, **CASES[case])) == expected


@pytest.mark.parametrize(
    "scenario",
    [
        *("clips", "scales_halves", "scales_often", "zeroes", "drops_many", "drops_unread"),
        *("checkpoints", thorough("scales"), thorough("drops")),
    ],
)
def test_gradients_answer_for_all_ranks(ranks: Ranks, scenario: str) -> None:
    expected = same(ranks.run(f"rank_gradients.{scenario}", 1))
    for count in (2, 4):
        assert same(ranks.run(f"rank_gradients.{scenario}", count)) == expected


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("looks", "take different ways"),
        ("scales", "ask different things of this step"),
        ("scales first", "ask different things of this step"),
        ("drops", "take different ways"),
    ],
)
def test_ranks_that_treat_gradients_differently_say_so(ranks: Ranks, what: str, words: str) -> None:
    all_say(ranks.start("rank_gradients.parts", 2, what=what).wait(), words)


@pytest.mark.parametrize("scenario", ["experts", "uneven", "catches"])
@pytest.mark.thorough
def test_neither_do_they_where_ranks_take_other_ways(ranks: Ranks, scenario: str) -> None:
    expected = same(ranks.run(scenario, 1))
    assert same(ranks.run(scenario, 2)) == expected


ZERO_3 = "no unit rests on a rank's device whole, .*: ZeRO-3$"
SOME = r"[12] of 3 units rests? on a rank's device whole, .* ZeRO-1/2-like: .*; what .* is ZeRO-3$"
ZERO_1_2 = "all units rest on a rank's device whole, which is ZeRO-1/2-like: [^;]*$"


@pytest.mark.parametrize(
    ("device", "words"), [("450KiB", ZERO_3), ("700KiB", SOME), ("64MiB", ZERO_1_2)]
)
def test_plan_and_report_say_how_a_model_is_partitioned(
    ranks: Ranks, device: str, words: str
) -> None:
    how: dict[str, Any] = {"memory": {"device": device, "host": "64MiB"}, "page_size": "64KiB"}
    (plan, report), (other,) = ranks.run("says_how_it_is_partitioned", 2, **how)
    for sentence, text in (plan, report, other):
        assert re.match(words, sentence), sentence
        assert sentence in text
    assert f"2 ranks; activations aside, {plan[0]}" in plan[1]
    for sentence, text in ranks.run("says_how_it_is_partitioned", 1, **how)[0]:
        assert sentence == ""
        assert "ZeRO" not in text


def test_one_rank_alone_may_compute_between_steps(ranks: Ranks) -> None:
    assert same(ranks.run("one_evaluates", 2)) == same(ranks.run("bits", 1, steps=2))


def test_one_rank_alone_may_read_at_the_end(ranks: Ranks) -> None:
    assert ranks.run("one_reads", 2) == [same(ranks.run("bits", 1, steps=1)), None]


def test_they_are_those_of_ddp(ranks: Ranks) -> None:
    assert max(ranks.run("against_ddp", 2)) <= 1e-6


def test_frozen_and_tied_parameters_and_buffers(ranks: Ranks) -> None:
    found = same(ranks.run("kinds", 2))
    assert found["frozen"]
    assert found["tied"]


@pytest.mark.thorough
def test_all_unwrap_and_wrap_again(ranks: Ranks) -> None:
    assert same(ranks.run("unwraps", 2)) == same(ranks.run("unwraps", 1))


def test_ranks_meet_between_backward_and_step(ranks: Ranks) -> None:
    assert same(ranks.run("meets_after_backward", 2))


def test_what_all_ranks_write_all_of_them_see(ranks: Ranks) -> None:
    assert same(ranks.run("writes", 2)) == same(ranks.run("writes", 1))


@pytest.mark.thorough
def test_what_one_rank_writes_ends_the_training(ranks: Ranks) -> None:
    all_say(ranks.start("writes_alone", 2).wait(), "rank 0 has (changed parameters|failed|ended)"
            "|rank 1 has (failed|ended)")  # fmt: skip


def test_an_exception_of_one_rank_ends_all(ranks: Ranks) -> None:
    """Also of those that wait by means of torch, which a rank that stays for others would keep."""
    outcomes = ranks.start("raises", 2).wait()
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "ArithmeticError" in outcomes[1].output


def test_a_rank_that_ends_early_ends_the_others(ranks: Ranks) -> None:
    left, stayed = ranks.start("ends_early", 2).wait()
    assert left.code == 0
    all_say([stayed], "rank 0 has ended its training, and this one has not")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_who_is_killed_is_named_by_all(ranks: Ranks, where: str) -> None:
    run = ranks.start("at_moment", 3, where=where, victim=1)
    run.await_mark("there")
    time.sleep(0.3)  # the others come to where they wait for it
    killed = run.kill(1)
    outcomes = run.wait()
    host = re.escape(socket.gethostname())
    pass_of = "forward" if where == "forward" else "backward"
    all_say(
        [outcomes[0], outcomes[2]],
        rf"rank 1 has (failed or )?died, on {host} in step 2 since strata.wrap\(\), last in the "
        rf"{pass_of} of \d(\.\d)?: its own output says why",
    )
    for outcome in outcomes:
        assert outcome.seconds - killed < ENDED_S


@pytest.mark.parametrize("seconds", [3, thorough(12)])
def test_who_is_stopped_is_waited_for(ranks: Ranks, seconds: int) -> None:
    run = ranks.start("stopped", 2)
    run.await_mark("there")
    run.kill(1, signal.SIGSTOP)
    (run.folder / "go").touch()
    time.sleep(seconds)
    assert run.codes() is None
    run.kill(1, signal.SIGCONT)
    outcomes = run.wait()
    assert [outcome.code for outcome in outcomes] == [0, 0], run.outputs()
    assert same([outcome.value for outcome in outcomes])
    assert ("waiting for rank 1" in outcomes[0].output) == (seconds > 10)


def test_ranks_whose_steps_differ_say_so(ranks: Ranks) -> None:
    all_say(ranks.start("differs", 2).wait(), "ask different things of this step")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("grad", "the values of the gradient of .* cannot be seen"),
        ("snapshot", "ssd_path"),
    ],
)
def test_what_is_not_there_yet_is_refused(ranks: Ranks, what: str, words: str) -> None:
    for said in ranks.run("refuses", 2, what=what):
        assert re.search(words, said), said


def test_torch_distributed_comes_first(ranks: Ranks) -> None:
    for outcome in ranks.start("bits", 2, meet=False).wait():
        assert "call torch.distributed.init_process_group" in outcome.output


def test_the_next_run_finds_nothing_of_one_that_was_killed(ranks: Ranks, tmp_path: Path) -> None:
    memory = {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"}
    options: dict[str, Any] = {"memory": memory, "ssd_path": str(tmp_path), "page_size": "64KiB"}
    run = ranks.start("at_moment", 2, where="forward", victim=0, **options)
    run.await_mark("there")
    for rank in (0, 1):
        run.kill(rank)
    run.wait()
    same(ranks.run("bits", 2, **options))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def script_of_bits(folder: Path, end: str = "") -> Path:
    """A program for torchrun, each rank of which prints what the scenario "bits" returns."""
    script = folder / "train.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(HOME)!r})\n"
        "import rank_scenarios as scenarios\n"
        "from pathlib import Path\n"
        "torch.set_num_threads(1)\n"
        "torch.distributed.init_process_group('gloo')\n"
        "rank = torch.distributed.get_rank()\n"
        "run = scenarios.Rank(rank, torch.distributed.get_world_size(), Path())\n"
        "sys.stdout.write(str(scenarios.bits(run)) + chr(10))  # at once, for others print, too\n"
        + end
    )
    return script


@pytest.mark.thorough
def test_torchrun_starts_them(tmp_path: Path) -> None:
    script = script_of_bits(tmp_path)
    done = subprocess.run(
        [*(sys.executable, "-m", "torch.distributed.run"), "--standalone", "--nproc-per-node", "2",
         str(script)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    same(done.stdout.split())
