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
from strata._planning.network import Network, crossing_of
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


def test_machines_have_what_they_have_each_and_a_network_between_them(ask, trace_path, capsys):
    four = ("--ranks", "4", "--machines", "2", "--link")
    fast, one = ask(*four, "1000GB/s")[0], ask("--ranks", "2")[0]
    assert fast["budgets"] == one["budgets"]  # two ranks share a machine, with and without others
    assert fast["network"]["machines"] == 2
    assert one["network"] is None
    trained = [unit for unit in load(trace_path).trace.units if unit.grad_bytes]
    gradients = sum(unit.param_bytes for unit in trained)
    # A machine gets half of each page once in a pass, and half of the gradients of both its ranks.
    assert fast["network"]["bytes"] >= 1.5 * gradients
    # No way gets more done with less than each page once, and one sum of gradients.
    assert fast["network"]["bytes_min"] == pytest.approx(gradients, rel=0.01)
    slow = ask(*four, "1MB/s")[0]
    assert slow["step_seconds"] == pytest.approx(slow["network"]["bytes"] / 1e6)
    least = slow["network"]["bytes_min"] / slow["network"]["bytes"]
    assert slow["percent_of_bound"] == pytest.approx(100 * least)
    assert "limited by the network" in slow["limited"]
    assert "limited by the network" not in fast["limited"]
    speed = ["--link", "1MB/s", "--ranks", "4", "--machines", "2"]
    assert cli.main(["plan", "--trace", trace_path, "--memory", BUDGET, *speed]) == 0
    said = capsys.readouterr().out
    assert "4 ranks on 2 machines" in said
    assert "(network), " in said


def of_ranks(path):
    """The trace, for one of several."""
    return sharing.shared_among(load(path).trace, 2, 2)


def test_a_machine_gets_parameters_once_and_sends_the_gradients_of_each_rank(trace_path):
    trace = of_ranks(trace_path)
    gradients = sum(unit.param_bytes for unit in trace.units if unit.grad_bytes)
    passes = sum(trace.units[use.unit].param_bytes for use in trace.uses)
    for ranks in (2, 8):
        crossing = crossing_of(trace, [False] * len(trace.units), Network(2, ranks, 1e9))
        expected = (passes + ranks // 2 * gradients) / 2
        assert crossing.bytes == pytest.approx(expected, rel=0.01)


def test_or_one_sum_of_them_in_float32(trace_path):
    trace = of_ranks(trace_path)
    nothing = [False] * len(trace.units)
    each, sums = (
        crossing_of(trace, nothing, Network(2, 8, 1e9, rank_sums=how)).bytes
        for how in ("ranks", "machines")
    )
    trained = [unit for unit in trace.units if unit.grad_bytes]
    saved = sum(4 * unit.param_bytes - 4 * unit.elements for unit in trained) / 2
    assert saved > 0
    assert each - sums == pytest.approx(saved, rel=0.01)
    one_rank_each = (
        crossing_of(trace, nothing, Network(2, 2, 1e9, rank_sums=how)).bytes
        for how in ("ranks", "machines")
    )
    assert len(set(one_rank_each)) == 1


def test_nothing_crosses_of_what_is_frozen(trace_path):
    trace = load(trace_path).trace
    nothing = [False] * len(trace.units)

    def crosses(trained, how="ranks"):
        """Where that part of each unit trains."""
        units = [unit.replace(grad_bytes=int(trained * unit.param_bytes)) for unit in trace.units]
        found = sharing.shared_among(trace.replace(units=units), 8, 2)
        return crossing_of(found, nothing, Network(2, 8, 1e9, rank_sums=how))

    for how in ("ranks", "machines"):
        assert (crosses(0, how).bytes, crosses(0, how).bytes_min) == (0, 0)
        assert crosses(0.25, how).bytes == pytest.approx(crosses(1, how).bytes / 4, rel=0.2)


def test_each_machine_has_all_that_is_frozen(trace_path):
    trace = load(trace_path).trace
    for codes in (1, 4):  # as they are, and as codes
        units = [
            u.replace(grad_bytes=0, state_bytes=0, code_bytes=u.param_bytes // codes)
            for u in trace.units
        ]
        for ranks, machines, part in ((4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 2, 1)):
            found = sharing.shared_among(trace.replace(units=units), ranks, machines)
            held = sum(unit.code_bytes - unit.remote_param_bytes for unit in found.units)
            expected = sum(unit.code_bytes for unit in units) / part
            assert held == pytest.approx(expected, rel=0.1)


def test_a_chunk_that_is_frozen_is_held_whole(trace_path):
    trace = load(trace_path).trace
    units = [u.replace(chunks=1, grad_bytes=0, state_bytes=0) for u in trace.units]
    found = sharing.shared_among(trace.replace(units=units), 8)
    lacked = [(unit.remote_param_bytes, unit.param_bytes) for unit in found.units]
    assert all(lacks in (0, whole) for lacks, whole in lacked)
    assert any(lacks == 0 for lacks, _ in lacked)


def test_half_a_unit_that_trains_is_shared_by_all(trace_path):
    trace = load(trace_path).trace
    units = [u.replace(grad_bytes=u.param_bytes // 2) for u in trace.units]  # in 16 bits
    found = sharing.shared_among(trace.replace(units=units), 4, 4)
    held = sum(unit.param_bytes - unit.remote_param_bytes for unit in found.units)
    whole = sum(unit.param_bytes for unit in units)
    assert held == pytest.approx((1 / 2 + 1 / 8) * whole, rel=0.1)


def test_what_relays_keep_comes_once(trace_path):
    trace = of_ranks(trace_path)
    nothing = [False] * len(trace.units)

    def crosses(room):
        return crossing_of(trace, nothing, Network(2, 2, 1e9, relay_bytes=room)).bytes

    params = sum(unit.param_bytes for unit in trace.units)
    passes = sum(trace.units[use.unit].param_bytes for use in trace.uses)
    again = (passes - params) / 2  # what the other machine holds of it
    assert again > 0
    for part in (0.0, 0.5, 1.0, 2.0):
        saved = crosses(0) - crosses(round(part * params / 2))
        assert saved == pytest.approx(min(part, 1.0) * again, rel=0.01)


def test_what_comes_as_codes_is_fewer_bytes(ask):
    speed = ("--ranks", "2", "--machines", "2", "--link", "1MB/s")
    exact, coded = ask(*speed)[0], ask(*speed, "--rank-gathers", "int8")[0]
    assert coded["network"]["bytes"] < exact["network"]["bytes"]
    assert coded["step_seconds"] < exact["step_seconds"]


def test_codes_of_a_step_are_counted(trace_path):
    trace = of_ranks(trace_path)
    nothing = [False] * len(trace.units)
    exact, coded = (
        crossing_of(trace, nothing, Network(2, 2, 1e9, gathers)) for gathers in ("exact", "int8")
    )
    saved = sum(
        trace.units[use.unit].param_bytes - 17 / 16 * trace.units[use.unit].elements
        for use in trace.uses
        if trace.units[use.unit].grad_bytes
    )
    assert saved > 0.2 * sum(trace.units[use.unit].param_bytes for use in trace.uses)
    assert exact.bytes - coded.bytes == pytest.approx(saved / 2, rel=0.01)


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
        (["--ranks", "2", "--machines", "2"], "needs the speed of their network: --link"),
        (["--ranks", "3", "--machines", "2", "--link", "1GB/s"], "cannot be on --machines 2"),
        (["--ranks", "2", "--link", "1GB/s"], "--link is of several machines"),
        (["--ranks", "2", "--rank-gathers", "int8"], "--rank-gathers is of several machines"),
        (["--ranks", "2", "--rank-sums", "machines"], "--rank-sums is of several machines"),
        (["--ranks", "257"], "ranks on one machine can be 1 to 256, and not 257"),
        (
            ["--ranks", "514", "--machines", "2", "--link", "1GB/s"],
            "ranks on one machine can be 1 to 256, and not 257",
        ),
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


def test_more_ranks_on_more_machines_can_be_asked_for(ask):
    """The limit is of a machine, and the core's."""
    header = Path(__file__).parents[2] / "memory/handshake.hpp"
    assert f"kPeersMax = {RANKS_MAX};" in header.read_text()
    assert ask("--ranks", "512", "--machines", "2", "--link", "1GB/s")[0]["ranks"] == 512


def test_an_estimate_has_room_for_sums_of_machines(folder, capsys):
    """They lie in as many pages of host memory as gradients that are sent (4: see ranks.md)."""
    told = ["--memory", "device=64MiB,host=64MiB", "--ranks", "4", "--machines", "2"]
    told += ["--link", "1GB/s", "--model", folder, "--rank-sums"]
    ranks, machines = (
        estimate(capsys, *told, sums)[0]["budgets"] for sums in ("ranks", "machines")
    )
    assert ranks["host_bytes"] - machines["host_bytes"] == 4 * ranks["page_bytes"]


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
