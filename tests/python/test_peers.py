"""How the benches talk to sides in other processes, without any peer installed."""

import os
import sys

import pytest

from benchmarks import adam, common, vs_deepspeed
from benchmarks.common import BenchError
from benchmarks.peers import environment
from benchmarks.peers.child import Child

SIDE = """
from benchmarks.peers.child import claim_stdout, memory_peak, serve
answers = claim_stdout()
print("a library that talks")
count = 0
def step():
    global count
    count += 1
    print("and talks")
    return {"count": count}
def fail():
    raise MemoryError("no room")
def grow():
    return {"gone": len(bytes(range(256)) * (1 << 20))}
serve(answers, {"grow": grow, "step": step, "fail": fail, "peak": memory_peak})
"""


def child(code=SIDE):
    return Child(
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": os.pathsep.join([str(common.ROOT), *sys.path])},
    )


def test_a_child_answers_every_command_whatever_it_prints():
    side = child()
    try:
        assert [side.ask("step")["count"] for _ in range(3)] == [1, 2, 3]
        assert side.ask("peak")["bytes"] > common.MIB
    finally:
        side.close()
        side.close()


def test_a_child_that_dies_says_why_and_stays_dead():
    side = child()
    try:
        with pytest.raises(BenchError, match="MemoryError: no room"):
            side.ask("fail")
        with pytest.raises(BenchError, match="no room"):
            side.ask("step")
    finally:
        side.close()


def test_a_child_that_never_gets_ready_says_why():
    with pytest.raises(BenchError, match="no such luck"):
        child("raise SystemExit('no such luck')")


def test_the_peak_is_what_was_once_resident():
    side = child()
    try:
        before = side.ask("peak")["bytes"]
        side.ask("grow")
        assert side.ask("peak")["bytes"] >= before + 200 * common.MIB
    finally:
        side.close()


@pytest.mark.parametrize("bench", [adam, vs_deepspeed])
def test_quick_mode_without_the_peers_says_what_to_run(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "READY", tmp_path / "missing")
    monkeypatch.setattr(environment, "make", lambda say: pytest.fail("quick mode installs nothing"))
    monkeypatch.setattr(adam, "loop_figures", lambda *_: [])
    context = common.Context(quick=True, seed=0, rounds=1, ssd_path=tmp_path)
    with pytest.raises(BenchError, match=r"python -m benchmarks\.peers"):
        list(bench.run(context))


def test_figures_of_a_setting_hold_strata_against_deepspeed():
    taken = {"deepspeed": [3.0, 4.0], "on_step": [1.0, 2.0]}
    peaks = {"deepspeed": 3000, "on_step": 600}
    figures = {
        figure.metric: figure
        for figure in vs_deepspeed.figures("host_128_tokens", taken, peaks, target=2.4)
    }
    speed = figures["on_step_host_128_tokens_speed"]
    assert speed.value == 2.5
    assert speed.reached
    memory = figures["on_step_host_128_tokens_memory"]
    assert memory.value == 0.2
    assert memory.reached


def test_losses_of_one_step_agree_within_rounding():
    assert vs_deepspeed.close(9.0796, 9.0801)
    assert not vs_deepspeed.close(9.0796, 8.7214)
