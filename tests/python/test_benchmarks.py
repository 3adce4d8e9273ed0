"""What the benches share. The benches themselves are run by hand, never as timed tests."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import adam, capacity, common, models, planned, quality, quality_run
from benchmarks.common import Figure
from benchmarks.modes import Mode, lock_free


def test_list_names_every_bench(capsys):
    assert command.main(["list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(command.BENCHES)
    assert {"step", "hide", "capacity", "plan-error", "ranks", "vs-torch"} <= set(names)


@pytest.mark.parametrize("name", command.BENCHES)
def test_every_bench_has_a_module(name):
    path = common.ROOT / "benchmarks" / f"{name.replace('-', '_')}.py"
    assert "def run(context: Context) -> Iterator[Figure]:" in path.read_text()


def test_an_unknown_name_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(["capasity"])
    assert refused.value.code == 2
    assert "did you mean 'capacity'?" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        command.main(["step", "--ssd-path", str(tmp_path / "missing")])
    assert "is not a folder" in capsys.readouterr().err


@pytest.fixture
def two_figures(monkeypatch):
    """The bench "wrap", replaced by one that yields a figure and then cannot go on."""

    def run_bench(name, context):
        yield Figure(name, "cost", 40.0, "µs", target=50, bound=1.0)
        yield Figure(name, "speed", float(context.seed), "%", target=90, better="higher")
        raise common.BenchError("the disk is on fire")

    monkeypatch.setattr(command, "run_bench", run_bench)


def test_figures_measured_before_a_failure_are_kept(two_figures, tmp_path, capsys):
    kept = tmp_path / "figures.jsonl"
    assert command.main(["wrap", "--json", str(kept), "--seed", "7"]) == 1
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["value"] for line in lines] == [40.0, 7.0]
    keys = {"bench", "metric", "value", "unit", "target", "bound", "machine", "commit", "seed"}
    assert all(keys <= line.keys() for line in lines)
    assert lines[0]["seed"] == 7
    assert "the disk is on fire" in capsys.readouterr().err


def test_json_to_stdout_leaves_the_table_to_stderr(two_figures, capsys):
    command.main(["wrap", "--json", "-"])
    out, err = capsys.readouterr()
    assert [json.loads(line)["metric"] for line in out.splitlines()] == ["cost", "speed"]
    assert "≤ 50" in err


def test_the_table_says_what_was_reached():
    text = io.StringIO()
    figures = [
        Figure("a", "fast", 40.0, "µs", target=50),
        Figure("a", "slow", 60.0, "µs", target=50),
        Figure("a", "large", 95.0, "%", target=90, better="higher"),
        Figure("a", "plain", 1.0, "s"),
    ]
    common.print_table(figures, 0, Console(file=text, width=160))
    rows = {
        line.split("│")[2].strip(): line for line in text.getvalue().splitlines() if "│" in line
    }
    assert "reached" in rows["fast"]
    assert "missed" in rows["slow"]
    assert "reached" in rows["large"]
    assert "≥ 90" in rows["large"]
    assert "reached" not in rows["plain"]


def test_sides_take_turns_and_each_begins_a_round():
    order = []

    def side(name):
        return lambda: order.append(name) or float(len(order))

    taken = common.take_turns({name: side(name) for name in "abc"}, 3, lambda text: None)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert taken["a"] == [1.0, 6.0, 8.0]


def test_a_slow_round_does_not_tilt_the_ratio():
    assert common.median_ratio([2.0, 200.0, 2.2], [1.0, 100.0, 1.0]) == 2.0


def test_parameters_are_counted_as_transformers_counts_them():
    model = models.llama(models.llama_config(128, 3, 256), torch.float32, seed=0)
    assert models.parameter_count(128, 3, 256) == sum(p.numel() for p in model.parameters())
    assert 165e6 < models.parameter_count(1024, 12) < 167e6


def test_the_capacity_search_finds_the_edge(monkeypatch):
    def fits(side, shape, context, run):
        return models.parameter_count(*shape) <= 300e6

    monkeypatch.setattr(capacity, "attempt", fits)
    context = common.Context(quick=False, seed=0, rounds=1, ssd_path=Path())
    found = capacity.largest("strata", context, run=None)
    assert 270e6 <= found <= 300e6
    monkeypatch.setattr(capacity, "attempt", lambda *_: False)
    assert capacity.largest("strata", context, run=None) == 0


@pytest.mark.parametrize("parameters", [10e6, 100e6, 1e9])
def test_shapes_have_about_the_parameters_asked_for(parameters):
    assert models.parameter_count(*capacity.shape_for(parameters)) == pytest.approx(
        parameters, rel=0.1
    )


def test_a_bound_that_steps_pass_ends_the_bench():
    def report(percent):
        return SimpleNamespace(percent_of_bound=percent)

    assert planned.share_of_bound(report(80.0)) == pytest.approx(0.8)
    assert planned.share_of_bound(report(100.0)) == 1.0
    for percent in (100.5, 0.0):
        with pytest.raises(common.BenchError, match="a bound that none can pass"):
            planned.share_of_bound(report(percent))


def outcome(mode, seed, held_out, staleness=(), digest=""):
    return quality_run.Outcome(
        mode, seed, [7.0, held_out], held_out, list(staleness), 0, 1.0, digest
    )


def test_quality_holds_a_lag_against_the_spread_of_seeds():
    held_out = {mode.name: (4.0, 4.2, 4.1) for mode in quality.MODES}
    held_out["lock_free_1"] = (4.1, 4.3, 4.2)
    held_out["8bit_state"] = (4.5, 4.7, 4.6)
    outcomes = [
        outcome(name, seed, loss, [30, 10] if name == "lock_free_1" else ())
        for name, losses in held_out.items()
        for seed, loss in enumerate(losses)
    ]
    outcomes[-1] = outcome("8bit_state", 2, 4.6, digest="other bits")  # lossy: may differ
    figures = {f.metric: f for f in quality.figures(outcomes)}
    assert figures["lock_free_1_excess"].value == pytest.approx(0.1)
    assert figures["lock_free_1_excess"].target == pytest.approx(0.2)
    assert figures["lock_free_1_excess"].reached
    assert figures["8bit_state_excess"].value == pytest.approx(0.5)
    assert figures["lock_free_1_forwards_1_steps_behind"].value == 25.0
    assert figures["in_backward_runs_that_differ"].value == 0


def test_quality_sees_a_single_bit_of_difference():
    runs = [outcome(mode.name, 0, 4.0, digest=mode.name) for mode in quality.MODES]
    figures = {f.metric: f for f in quality.figures(runs)}
    assert figures["in_backward_runs_that_differ"].value == 1
    assert not figures["in_backward_runs_that_differ"].reached
    assert figures["lock_free_1_excess"].target is None  # one seed has no spread


def test_the_learning_rate_rises_and_falls_to_nothing():
    rates = [quality_run.rate(step, 400) for step in range(400)]
    assert max(rates) == 1.0
    assert rates.index(1.0) == 39
    assert rates[0] == pytest.approx(1 / 40)
    assert 0 < rates[-1] < 0.01


def test_modes_ask_for_the_memory_that_they_need():
    on_step, in_backward = Mode("on_step"), Mode("in_backward", "in_backward")
    host = [mode.state_on_ssd(10**9)["host"] for mode in (in_backward, on_step, lock_free(1))]
    assert host == sorted(host)
    assert lock_free(1).state_on_ssd(10**9, passing=0)["host"] == pytest.approx(6.3e9)
    assert "ssd" not in on_step.state_in_host(10**9)


def test_a_quality_run_takes_three_seeds_unless_told_otherwise():
    options = command.parse(["quality"])
    assert command.context_of("quality", options).rounds == 3
    assert command.context_of("step", options).rounds == 5
    assert command.context_of("quality", command.parse(["quality", "--rounds", "1"])).rounds == 1
    assert command.context_of("quality", command.parse(["quality", "--quick"])).rounds == 1


def test_kernels_are_held_against_peers_and_the_loop():
    taken = {"strata": [0.1, 0.2], "loop": [0.1, 0.1], "deepspeed": [0.2, 0.4], "torch": [0.3, 0.3]}
    figures = {f.metric: f for f in adam.figures(taken, 10**8)}
    assert figures["strata_time"].value == pytest.approx(1.5)
    assert figures["speed_over_deepspeed"].value == 2.0
    assert figures["speed_over_deepspeed"].reached
    assert figures["of_loop"].value == 75.0
