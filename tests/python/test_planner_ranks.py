"""`strata plan` and `strata estimate` for several ranks of a machine."""

from pathlib import Path

import pytest
import test_planner_commands as commands
import torch
from strata._cli import estimate as counting
from strata._cli import main as cli
from strata._cli import sharing
from strata._config.choices import RANKS_MAX
from strata._config.options import Options
from strata._config.ranks import Ranks
from strata._storage.trace_file import load
from test_planner_commands import BUDGET, TOKENS, estimate
from transformers import LlamaConfig

# Fixtures.
measured, trace_path = commands.measured, commands.trace_path
ask, folder = commands.ask, commands.folder


def test_ranks_share_the_machine_and_have_a_device_each(ask, trace_path, capsys):
    one, two = ask()[0], ask("--ranks", "2")[0]
    assert (one["ranks"], two["ranks"], one["partition"]) == (1, 2, "")
    assert two["budgets"]["device_bytes"] == one["budgets"]["device_bytes"]
    assert 2 * two["budgets"]["host_bytes"] == one["budgets"]["host_bytes"]
    assert two["tokens_per_second"] == pytest.approx(2 * TOKENS / two["step_seconds"])

    def rests(found):
        return sum(found["plan"][f"resting_{tier}_bytes"] for tier in ("device", "host", "ssd"))

    assert rests(two) < 0.75 * rests(one)  # gradients are summed in float32
    assert cli.main(["plan", "--trace", trace_path, "--memory", BUDGET, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 ranks, each with a device of its own" in said
    assert two["partition"] in said


def test_what_is_frozen_is_shared_out(trace_path):
    trace = load(trace_path).trace
    for codes in (1, 4):  # as they are, and as codes
        units = [
            u.replace(grad_bytes=0, state_bytes=0, code_bytes=u.param_bytes // codes)
            for u in trace.units
        ]
        for ranks in (2, 4):
            found = sharing.shared_among(trace.replace(units=units), ranks)
            held = sum(unit.code_bytes - unit.remote_param_bytes for unit in found.units)
            expected = sum(unit.code_bytes for unit in units) / ranks
            assert held == pytest.approx(expected, rel=0.1)


def test_a_chunk_that_is_frozen_is_held_whole(trace_path):
    trace = load(trace_path).trace
    units = [u.replace(chunks=1, grad_bytes=0, state_bytes=0) for u in trace.units]
    found = sharing.shared_among(trace.replace(units=units), 8)
    lacked = [(unit.remote_param_bytes, unit.param_bytes) for unit in found.units]
    assert all(lacks in (0, whole) for lacks, whole in lacked)
    assert any(lacks == 0 for lacks, _ in lacked)


def test_what_rests_on_the_devices_of_ranks_whole_is_told(ask):
    said = []
    for budget in ("256MiB", "8GiB"):
        found, status = ask("--ranks", "2", memory=f"device={budget},host=8GiB")
        assert status == 0
        assert ("ZeRO-1/2-like" in found["partition"]) is any(found["plan"]["resident"])
        assert ("ZeRO-3" in found["partition"]) is not all(found["plan"]["resident"])
        said.append(found["partition"])
    assert said[0] != said[1]


def test_ranks_share_the_speed_of_the_ssd(ask):
    told = ["--ssd-read-speed", "1GB/s", "--ssd-write-speed", "1GB/s", "--ranks", "2"]
    twice = ["--ssd-read-speed", "2GB/s", "--ssd-write-speed", "2GB/s", "--ranks", "2"]
    memory = "device=256MiB,host=400MiB,ssd=8GiB"
    slow, fast = (ask(*speeds, memory=memory)[0] for speeds in (told, twice))
    assert slow["lanes"]["read"]["bytes"] > 0
    seconds = slow["lanes"]["read"]["busy_seconds"]
    assert seconds >= 0.99 * slow["lanes"]["read"]["bytes"] / 0.5e9
    assert fast["step_seconds"] < slow["step_seconds"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "0"], "'0' is not a positive whole number"),
        (["--ranks", "257"], "ranks on one machine can be 1 to 256, and not 257"),
    ],
)
def test_ranks_that_cannot_be_asked_for_are_refused(trace_path, capsys, options, says):
    with pytest.raises(SystemExit) as refused:
        cli.main(["plan", "--trace", trace_path, "--memory", BUDGET, *options])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_are_shared_out_on_paper_as_in_a_run(folder, ranks, dtype):
    def traced(count):
        options = Options(dtype=dtype, page_size="64KiB", workers=1)
        options.ranks = Ranks(0, count, "") if count > 1 else None
        config = LlamaConfig.from_pretrained(folder)
        memory = {"device": 64 << 20, "host": 256 << 20, "ssd": 0}
        step = counting.Step(config, 1, 32, memory, "host", options)
        model, counted = counting.count(step)
        sizes = counting.page_sizes(model, counted, step)
        return counting.make_trace(counted, sizes, 1, 1e12, 1e12)

    def sizes(trace):
        names = [f"{where}{what}_bytes" for where in ("", "remote_") for what in
                 ("param", "grad", "state")]  # fmt: skip
        return [[getattr(unit, name) for name in names] for unit in trace.units]

    def held(trace):
        return sum(sum(of[:3]) - sum(of[3:6]) for of in sizes(trace))

    on_paper, run = sharing.shared_among(traced(1), ranks), traced(ranks)
    if dtype == torch.float32:
        assert sizes(on_paper) == sizes(run)
    else:  # last chunks have fewer pages of gradients than others
        assert held(on_paper) == pytest.approx(held(run), rel=0.25)


def test_the_limit_of_ranks_is_that_of_the_core():
    header = Path(__file__).parents[2] / "memory/handshake.hpp"
    assert f"kPeersMax = {RANKS_MAX};" in header.read_text()


def test_an_estimate_is_of_the_rank_that_holds_most(folder, capsys):
    memory = ["--memory", "device=64MiB,host=64MiB"]
    one = estimate(capsys, "--model", folder, *memory)[0]
    two, status = estimate(capsys, "--model", folder, *memory, "--ranks", "2")
    assert status == 0
    assert two["tokens_per_second"] == pytest.approx(2 * 128 / two["step_seconds"])
    assert two["budgets"]["host_bytes"] < one["budgets"]["host_bytes"] / 2 + 1
    assert "ZeRO" in two["partition"]
    # One device of the machine computes what two ranks do, one behind the other.
    ratio = two["lanes"]["compute"]["busy_seconds"] / one["lanes"]["compute"]["busy_seconds"]
    assert ratio == pytest.approx(2, rel=0.1)
