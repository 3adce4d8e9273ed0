"""Ranks of several machines, which share no memory: here they are processes of one host that were
told so. What each does is in rank_scenarios.py and rank_saves.py; rank_server.py starts them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Ranks
from test_ranks import CASES, QUICK, all_say, same, script_of_bits
from variants import thorough

EACH = "ab"  # by rank: its machine
TWICE = "aabb"
LOST_S = 10.0  # in which all ranks know that one has died


@pytest.fixture(autouse=True)
def leaves_nothing(ranks: Ranks) -> Iterator[None]:
    """No folder in which ranks have met is there when all have gone."""
    yield
    assert not list(ranks.temporary.glob("strata-ranks-*"))


@pytest.mark.parametrize(
    "case",
    [case if case == QUICK[0] else thorough(case) for case in CASES],
)
def test_bits_are_those_of_one_process(ranks: Ranks, case: str) -> None:
    expected = same(ranks.run("bits", 1, **CASES[case]))
    for machines in (EACH, TWICE):
        assert same(ranks.run("bits", machines, **CASES[case])) == expected


@pytest.mark.parametrize("machines", [EACH, thorough(TWICE)])
def test_nor_where_a_base_rests_as_codes(ranks: Ranks, machines: str) -> None:
    case = {"form": "nf4-double", **CASES["ssd"]}
    assert same(ranks.run("codes", machines, **case)) == same(ranks.run("codes", 1, **case))


@pytest.mark.parametrize("machines", [EACH, thorough(TWICE)])
@pytest.mark.parametrize("update", ["in_backward", thorough("lock-free:0")])
def test_nor_when_updates_begin(ranks: Ranks, update: str, machines: str) -> None:
    of = len(machines)
    expected = same(ranks.run("rank_modes.bits", 1, of=of))
    assert same(ranks.run("rank_modes.bits", machines, of=of, update=update)) == expected


@pytest.mark.parametrize("machines", [TWICE, thorough("abab"), thorough("aaab")])
def test_a_page_crosses_once_for_all_ranks_of_a_machine(ranks: Ranks, machines: str) -> None:
    """Also where they compute one behind the other."""
    found = ranks.run("rank_promises.crosses", machines)
    sent, owned = (sum(of) for of in zip(*found, strict=True))
    assert 0.95 * owned < sent < 1.15 * owned  # pages are not full


@pytest.mark.parametrize(
    ("machines", "dtype", "ratio"),
    [
        (EACH, "bfloat16", 17 / 32),
        thorough(TWICE, "float32", 17 / 64),
        thorough(EACH, "float16", 17 / 32),
    ],
)
def test_parameters_may_cross_as_codes(
    ranks: Ranks, tmp_path: Path, machines: str, dtype: str, ratio: float
) -> None:
    """To who computes with them. Who reads has what their owners have, and so has a checkpoint."""
    exact = ranks.run("rank_gathers.trains", machines, dtype=dtype)
    path = str(tmp_path / "saved")
    how = {"dtype": dtype, "rank_gathers": "int8"}
    found = ranks.run("rank_gathers.trains", machines, path=path, **how)
    for one in found:
        assert one["losses"][-1] < 0.5 * one["losses"][0]
        assert one["losses"][-1] == pytest.approx(exact[0]["losses"][-1], rel=0.05)
        assert "parameters as int8 codes (rank_gathers): lossy" in one["report"]
    assert all("lossy" not in one["report"] for one in exact)
    assert same([one["hash"] for one in found]) != same([one["hash"] for one in exact])
    sent = [sum(one["forward"] for one in run) for run in (found, exact)]
    assert sent[0] == pytest.approx(ratio * sent[1], rel=0.05)
    runs = [run for one in found for run in one["mine"]]
    loaded = ranks.run("rank_gathers.loads", 1, path=path, runs=runs, dtype=dtype)[0]
    assert loaded["masters"] == [master for one in found for master in one["masters"]]
    assert loaded["hash"] == found[0]["hash"]


@pytest.mark.parametrize("case", ["float32", thorough("ssd")])
def test_a_machine_may_send_one_sum_of_its_gradients(ranks: Ranks, case: str) -> None:
    """In float32 half of what two ranks have, as much in bfloat16; machines of one rank send their
    gradients. Of parameters all send the same, as relays have room for them."""
    steps, options = 2, {**CASES[case], "memory": {"device": "4MiB", "host": "128MiB"}}
    if "ssd_path" in options:
        options["memory"]["ssd"] = "1GiB"
    each = ranks.run("rank_promises.sends", TWICE, steps=steps, **options)
    sums = ranks.run("rank_promises.sends", TWICE, steps=steps, rank_sums="machines", **options)
    assert all("sums of machines (rank_sums)" in one["report"] for one in sums)
    bits = [same([one["hash"] for one in run]) for run in (each, sums)]
    assert case != "float32" or bits[0] != bits[1], "a sum of sums is another one"
    sent = [sum(one["sent"] for one in run) for run in (each, sums)]
    saved = steps * sums[0]["gradients"] if case == "float32" else 0
    assert sent[0] - sent[1] == pytest.approx(saved, abs=0.04 * steps * sums[0]["gradients"])
    alone = [ranks.run("bits", EACH, rank_sums=how) for how in ("ranks", "machines")]
    assert same(alone[0]) == same(alone[1])


@pytest.mark.parametrize("update", ["in_backward", thorough("lock-free:0")])
def test_sums_of_machines_have_the_same_bits_however_updates_begin(
    ranks: Ranks, update: str
) -> None:
    how = {"of": len(TWICE), "rank_sums": "machines"}
    expected = same(ranks.run("rank_modes.bits", TWICE, **how))
    assert same(ranks.run("rank_modes.bits", TWICE, update=update, **how)) == expected


def test_a_backward_outside_modules_sees_what_its_forward_saw(ranks: Ranks) -> None:
    exact = ranks.run("rank_gathers.penalises", EACH)
    assert same(ranks.run("rank_gathers.penalises", EACH, rank_gathers="int8")) == same(exact)


def test_of_one_machine_nothing_crosses(ranks: Ranks) -> None:
    assert same(ranks.run("bits", 2, rank_gathers="int8")) == same(ranks.run("bits", 1))


@pytest.mark.parametrize("machines", ["abcd", "abab", "aaab"])
@pytest.mark.thorough
def test_nor_does_it_matter_who_is_where(ranks: Ranks, machines: str) -> None:
    assert same(ranks.run("bits", machines)) == same(ranks.run("bits", 1))


@pytest.mark.parametrize(
    "scenario",
    ["clips", thorough("scales"), thorough("drops")],
)
def test_gradients_answer_for_all_ranks(ranks: Ranks, scenario: str) -> None:
    expected = same(ranks.run(f"rank_gradients.{scenario}", 1))
    assert same(ranks.run(f"rank_gradients.{scenario}", EACH)) == expected


@pytest.mark.parametrize(
    ("scenario", "machines"), [("experts", EACH), ("experts", TWICE), ("uneven", EACH)]
)
@pytest.mark.thorough
def test_ranks_may_take_other_ways(ranks: Ranks, scenario: str, machines: str) -> None:
    assert same(ranks.run(scenario, machines)) == same(ranks.run(scenario, 1))


@pytest.mark.parametrize("machines", [EACH, TWICE])
@pytest.mark.thorough
def test_one_rank_alone_may_compute_between_steps(ranks: Ranks, machines: str) -> None:
    assert same(ranks.run("one_evaluates", machines)) == same(ranks.run("bits", 1, steps=2))


@pytest.mark.parametrize("machines", [EACH, TWICE])
@pytest.mark.thorough
def test_one_rank_alone_may_read_at_the_end(ranks: Ranks, machines: str) -> None:
    first, *others = ranks.run("one_reads", machines)
    assert first == same(ranks.run("bits", 1, steps=1))
    assert others == [None] * (len(machines) - 1)


def test_frozen_and_tied_parameters_and_buffers(ranks: Ranks) -> None:
    found = same(ranks.run("kinds", EACH))
    assert found["frozen"]
    assert found["tied"]


@pytest.mark.thorough
def test_all_unwrap_and_wrap_again(ranks: Ranks) -> None:
    assert same(ranks.run("unwraps", TWICE)) == same(ranks.run("unwraps", 1))


@pytest.mark.parametrize("machines", [EACH, TWICE])
@pytest.mark.thorough
def test_what_all_ranks_write_all_of_them_see(ranks: Ranks, machines: str) -> None:
    assert same(ranks.run("writes", machines)) == same(ranks.run("writes", 1))


@pytest.mark.thorough
def test_ranks_meet_between_backward_and_step(ranks: Ranks) -> None:
    assert same(ranks.run("meets_after_backward", EACH))


@pytest.mark.parametrize("state_dtype", [thorough(None), "8bit"])
def test_a_checkpoint_goes_on_elsewhere(
    ranks: Ranks, tmp_path: Path, state_dtype: str | None
) -> None:
    """Of a disk that all machines see."""
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    kind = {} if state_dtype is None else {"state_dtype": state_dtype}
    expected = ranks.run("rank_saves.saves", 1, path=str(alone), **kind)[0]["hash"]
    for found in ranks.run("rank_saves.saves", TWICE, path=str(apart), **kind):
        assert found["hash"] == expected
    for count in (1, EACH):
        for found in ranks.run("rank_saves.loads", count, path=str(apart), **kind):
            assert found["hash"] == expected


def test_ranks_whose_steps_differ_say_so(ranks: Ranks) -> None:
    all_say(ranks.start("differs", EACH).wait(), "ask different things of this step")


def test_a_machine_is_what_shares_memory(ranks: Ranks) -> None:
    assert same(ranks.run("rank_promises.machines", 2)) == []
    assert same(ranks.run("rank_promises.machines", "aab")) == ["a", "a", "b"]


def test_ranks_that_see_other_folders_are_of_other_machines(ranks: Ranks) -> None:
    """As in containers, whose processes may be of one user and one list."""
    (alone,) = ranks.run("rank_promises.has_its_own_tmp", 1)
    found = ranks.run("rank_promises.has_its_own_tmp", 4)
    assert {of["hash"] for of in found} == {alone["hash"]}
    first, other = found[0]["machines"][::2]
    assert first != other
    assert all(of["machines"] == [first, first, other, other] for of in found)
    assert all(of["left"] == [] for of in found)


def test_a_rank_that_ends_early_ends_the_others(ranks: Ranks) -> None:
    left, stayed = ranks.start("ends_early", EACH).wait()
    assert left.code == 0, left.output
    all_say([stayed], "rank 0 has ended its training, and this one has not")


def survivors_say(outcomes: list[Outcome], since: float) -> None:
    """Rank 1, of machine b, was lost: who, where, in which step, within the time."""
    for outcome in outcomes:
        all_say([outcome], r"rank 1 has (failed or )?died.* on b in step \d")
        assert outcome.seconds - since < LOST_S + 1.0  # an interpreter takes a while to end


def test_where_one_machine_has_no_folder_to_meet_in_the_other_keeps_none(ranks: Ranks) -> None:
    first, second = ranks.run("rank_refusals.is_refused", "ab", what="other folder")
    assert second[0] == "PermissionError"
    assert first[1] == "strata.wrap() was refused on rank 1: PermissionError: no room to meet"


@pytest.mark.parametrize("machines", ["aba", "abab"])
@pytest.mark.parametrize("where", ["step", thorough("forward"), thorough("backward")])
def test_who_is_killed_is_named_by_all(ranks: Ranks, where: str, machines: str) -> None:
    """Of two on each machine one holds pages, and one relays them."""
    run = ranks.start("at_moment", machines, where=where, victim=1)
    run.await_mark("there")
    time.sleep(0.3)  # the others come to where they wait for it
    killed = run.kill(1)
    outcomes = run.wait()
    survivors_say(outcomes[:1] + outcomes[2:], killed)


@pytest.mark.parametrize("machines", [EACH, "cba", "abab"])
@pytest.mark.thorough
def test_who_is_stopped_is_lost_after_a_while(ranks: Ranks, machines: str) -> None:
    """No other rank is lost with it."""
    run = ranks.start("stopped", machines)
    run.await_mark("there")
    stopped = run.kill(1, signal.SIGSTOP)
    (run.folder / "go").touch()
    time.sleep(LOST_S + 3.0)
    run.kill(1)
    outcomes = run.wait()
    survivors_say([outcome for rank, outcome in enumerate(outcomes) if rank != 1], stopped + 2.0)


@pytest.mark.thorough
def test_torchrun_starts_them(tmp_path: Path, ranks: Ranks) -> None:
    """Two agents, as on two hosts, with two ranks each."""
    script = script_of_bits(tmp_path, "torch.distributed.destroy_process_group()\n")
    agents = [
        subprocess.Popen(
            [*(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
             *(f"--node-rank={node}", "--master-addr=127.0.0.1", "--master-port=29517"),
             str(script)],
            stdout=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "STRATA_MACHINE": f"host-{node}",
                              "GLOO_SOCKET_IFNAME": "lo"},
        )
        for node in (0, 1)
    ]  # fmt: skip
    outputs: list[Any] = [agent.communicate(timeout=600)[0].split() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert [len(output) for output in outputs] == [2, 2]
    assert same(outputs[0] + outputs[1]) == same(ranks.run("bits", 1))
