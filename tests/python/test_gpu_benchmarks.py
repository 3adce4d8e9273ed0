"""The benches of a GPU on the host, which is a device as well: each runs at its smallest size, and
what it says of its figures holds. No figure is a figure of a GPU.
"""

import gc
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    allocator,
    capacity_gpu,
    common,
    device,
    host_room,
    models,
    step_gpu,
    update_gpu,
    vs_torch,
    vs_torch_child,
)
from benchmarks import copy as copy_bench
from benchmarks.common import GIB, ROOT


@pytest.fixture
def context(tmp_path):
    return common.Context(quick=True, seed=0, rounds=1, ssd_path=tmp_path)


@pytest.fixture
def program():
    if not update_gpu.PROGRAM.exists():
        pytest.skip(f"{update_gpu.PROGRAM} is not built")


def by_metric(figures):
    return {figure.metric: figure for figure in figures}


def test_pages_are_held_against_one_copy(context):
    figures = by_metric(copy_bench.run(context))
    for way in ("in", "out", "both"):
        bandwidth = figures[f"{way}_bandwidth"]
        assert 0 < bandwidth.value < 1000
        assert 0 < bandwidth.bound < 1000
        assert figures[f"{way}_of_one_copy"].target is None  # the host has none to reach


def test_the_update_is_held_against_a_copy(context, program):
    figures = by_metric(update_gpu.run(context))
    bandwidth = figures["bandwidth"]
    assert 0 < bandwidth.value < 1000
    assert figures["of_copy"].value == pytest.approx(100 * bandwidth.value / bandwidth.bound)


def test_a_program_that_refuses_is_quoted(context, program):
    with pytest.raises(common.BenchError, match="usage: device_update"):
        update_gpu.update_bandwidth(context, 5)


def test_a_step_is_held_against_matrix_products_and_the_bound(context):
    figures = by_metric(step_gpu.run(context))
    for tokens in (64, 128):
        assert figures[f"matrix_products_{tokens}"].value > 0
        seconds = figures[f"seconds_{tokens}"]
        share = seconds.bound / seconds.value
        assert figures[f"of_bound_{tokens}"].value == pytest.approx(100 * share)
        assert figures[f"utilisation_{tokens}"].target is None


def test_waits_of_a_steady_step_are_figures():
    found = by_metric(step_gpu.waits({"device": 0, "stream": 3, "event": 5}))
    assert found["device_synchronisations"].reached
    assert not found["stream_synchronisations"].reached
    assert found["event_synchronisations"].target is None


def test_what_strata_asks_of_the_driver_in_a_step_are_figures():
    calls = {"stream_wait": 20, "event_synchronize": 3, "stream_synchronize": 1, "map": 0}
    found = by_metric(step_gpu.driver_calls(calls, 64))
    assert found["driver_stream_wait_64"].value == 20
    assert found["driver_event_synchronize_64"].value == 3
    assert found["driver_event_synchronize_64"].target is None
    assert not found["driver_stream_synchronize_64"].reached
    assert found["driver_map_64"].reached
    assert list(step_gpu.driver_calls({}, 64)) == []  # the host has no driver


def test_figures_come_before_the_trace_whose_model_is_the_smallest(context, monkeypatch):
    traced = []

    def trace(step):
        traced.append(step)
        step()
        return {"device": 0, "stream": 1, "event": 0}

    # The host stands for a GPU, as far as the order of things goes.
    monkeypatch.setattr(step_gpu, "HOST", "nowhere")
    monkeypatch.setattr(step_gpu, "free_bytes", lambda name: 1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (1 << 29, 1 << 30))
    monkeypatch.setattr(step_gpu, "synchronisations", trace)
    metrics = []
    for figure in step_gpu.run(context):
        metrics.append(figure.metric)
        if not figure.metric.endswith("_synchronisations"):
            assert not traced, f"{figure.metric} waits for the trace"
    assert len(traced) == 1
    assert {"utilisation_64", "of_bound_128", "stream_synchronisations"} <= set(metrics)


def test_utilisation_counts_the_arithmetic_of_the_model_alone():
    setting, tokens = step_gpu.Setting(step_gpu.LLAMA_8B, (16,), 4096, 0, 0), 65_536
    figures = by_metric(step_gpu.figures(setting, tokens, 10.0, 800e12, 8.0, 55.0))
    # The usual rule: 6 for each parameter but the embedding's, and 6 L s h for causal attention.
    parameters = step_gpu.LLAMA_8B.parameters - 128_256 * 4096
    arithmetic = tokens * (6 * parameters + 6 * 32 * 4096 * 4096)
    assert figures["utilisation_65536"].value == pytest.approx(
        100 * arithmetic / 10 / 800e12, rel=1e-3
    )
    assert figures["tokens_65536"].value == pytest.approx(tokens / 10)
    assert figures["of_bound_65536"].value == pytest.approx(80)


def test_the_8b_model_is_the_one_of_its_sizes():
    sizes = step_gpu.LLAMA_8B
    with torch.device("meta"):
        model = models.LlamaForCausalLM(models.config_of(sizes, 4096))
    assert sum(p.numel() for p in model.parameters()) == sizes.parameters
    assert sizes.parameters == pytest.approx(8.03e9, rel=1e-3)


def test_too_little_host_memory_is_refused_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(step_gpu, "grow", lambda needed, say: None)
    monkeypatch.setattr(step_gpu, "free_host_bytes", lambda: 64 * 10**9)
    with pytest.raises(common.BenchError, match=r"needs 10\d GB of host memory, 64 GB are free"):
        step_gpu.full_setting(print)


class Here:
    """A child of vs-torch that is none: three processes take a minute to start."""

    def __init__(self, command, env):
        at = command.index("benchmarks.vs_torch_child")
        options = vs_torch_child.parse(command[at + 1 :])
        self.side = vs_torch_child.open_side(options, vs_torch_child.QUICK)
        self.commands = vs_torch_child.commands(self.side, options.device)

    def ask(self, command):
        return self.commands[command]()

    def close(self):
        self.side.close()


def test_strata_and_plain_pytorch_take_turns(context, monkeypatch):
    gc.collect()  # a model of another test may still record, and a thread has one profiler
    monkeypatch.setattr(vs_torch, "Child", Here)
    figures = by_metric(vs_torch.run(context))
    for side in ("plain", *vs_torch.MODES):
        assert figures[f"{side}_tokens"].value > 0
    for mode in vs_torch.MODES:
        assert figures[f"{mode}_of_plain"].value > 0


def test_nothing_stays_in_pytorchs_cache_while_others_take_their_turn(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))

    def command():
        done.append("command")
        return {"loss": 1.0}

    assert vs_torch_child.between_turns(command, "host")() == {"loss": 1.0}
    assert vs_torch_child.between_turns(command, "cuda:0")() == {"loss": 1.0}
    assert done == ["command", "command", "synchronize", "empty"]


@pytest.mark.parametrize("set_by_user", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}])
def test_segments_expand_before_torch_is_there(set_by_user):
    code = """if True:
        import os, runpy, sys
        class Look:
            def find_spec(self, name, *_):
                if name == "torch":
                    print(*(os.environ.get(n) for n in sys.argv[1:]), flush=True)
                    os._exit(0)
        sys.meta_path.insert(0, Look())
        runpy.run_module("benchmarks.__main__")
    """
    clean = {n: v for n, v in os.environ.items() if n not in allocator.NAMES}
    command = [sys.executable, "-c", code, *allocator.NAMES]
    done = subprocess.run(
        command, env=clean | set_by_user, cwd=ROOT, capture_output=True, text=True
    )
    wanted = ["None", "backend:native"] if set_by_user else [allocator.SETTING] * 2
    assert done.stdout.split() == wanted, done.stderr


class Growing:
    """A machine that shows 4 GiB, and 8 more whenever less than one is left, up to a limit."""

    def __init__(self, most):
        self.total, self.used, self.most = 4 * GIB, GIB, most

    def step(self):
        self.used += GIB
        if self.total - self.used < GIB:
            self.total = min(self.most, self.total + 8 * GIB)


@pytest.mark.parametrize(("most", "held"), [(4, 3), (20, 19), (64, 40)])
def test_host_memory_is_touched_until_it_grows_no_more(most, held):
    machine = Growing(most * GIB)
    found = host_room.touch(
        40 * GIB, machine.step, lambda: machine.total - machine.used, lambda: machine.total
    )
    assert found == held * GIB
    assert machine.used <= machine.total


@pytest.mark.thorough
def test_the_largest_model_is_looked_for_in_children(context):
    figures = by_metric(capacity_gpu.run(context))
    assert figures["parameters"].value == models.parameter_count(256, 2)


@pytest.mark.parametrize("edge", [1, 3, 70, 131, 180, 200])
def test_the_search_finds_the_edge_within_a_hundredth(edge):
    tried = []

    def fits(layers):
        tried.append(layers)
        return layers <= edge

    found = capacity_gpu.largest(200, fits)
    assert edge - 2 <= found <= edge
    assert len(tried) == len(set(tried)) <= 12
    assert capacity_gpu.largest(200, lambda layers: False) == 0


def test_a_model_of_all_bytes_is_deep_enough_for_small_steps():
    for parameters in (1e9, 26e9, 200e9):
        hidden = capacity_gpu.width_for(parameters)
        layers = capacity_gpu.layers_for(hidden, parameters)
        assert layers >= capacity_gpu.DEPTH_MIN
        assert models.parameter_count(hidden, layers) <= parameters
        assert models.parameter_count(hidden, layers + 1) > parameters


def test_an_attempt_that_takes_too_long_does_not_fit(context, monkeypatch, capsys):
    monkeypatch.setattr(capacity_gpu, "ATTEMPT_SECONDS", 0.1)
    assert not capacity_gpu.attempt(context, capacity_gpu.QUICK, 256, 2)
    assert "not within 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.NEEDS_GPU)
def test_full_size_asks_for_a_gpu(name, tmp_path, capsys):
    assert command.main([name, "--ssd-path", str(tmp_path)]) == 1
    assert "needs a GPU: pass --device cuda" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path, capsys):
    assert command.main(["step-gpu", "--device", "cuda", "--ssd-path", str(tmp_path)]) == 1
    assert "sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "name"), [("host", "host"), ("cpu", "host"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")]
)
def test_devices_have_one_name(asked, name, tmp_path):
    assert device.parse_device(asked) == name
    options = command.parse(["copy", "--device", asked, "--ssd-path", str(tmp_path)])
    assert command.context_of("copy", options).device == name


@pytest.mark.parametrize("arguments", [["copy", "--device", "tpu"], ["step", "--device", "cuda"]])
def test_a_device_that_makes_no_sense_is_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        command.parse([*arguments, "--ssd-path", str(tmp_path)])
    assert refused.value.code == 2
    assert "--device" in capsys.readouterr().err


def test_all_are_those_that_the_device_is_made_for(tmp_path):
    def chosen(*arguments):
        return list(command.chosen(command.parse(["all", "--ssd-path", str(tmp_path), *arguments])))

    assert not set(command.NEEDS_GPU) & set(chosen())
    assert {"step", "copy", "update-gpu"} <= set(chosen())
    assert chosen("--quick") == list(command.BENCHES)
    assert chosen("--device", "cuda") == list(command.OF_DEVICE)
