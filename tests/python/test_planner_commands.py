"""`strata plan` and `strata estimate`: what they answer, and what they refuse."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from strata._cli import main as cli
from strata._cli import planner
from strata._config import choices, configure, device
from strata._config.options import Options
from strata._profiling import probes
from strata._profiling.calibrate import Calibration
from strata._storage import trace_file
from strata._storage.trace_file import Origin
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import paper

TOKENS = 4096
SIZES = replace(paper.LLAMA_7B, name="toy", layers=6, hidden=512, feed_forward=1408, heads=8)
SIZES = replace(SIZES, kv_heads=8, vocabulary=4000)
COSTS = paper.PaperMachine("", 1, 1.0, 10e9, 1, 100e9, 1, 2e9, 2e9).costs()
BUDGET = "device=1GiB,host=4GiB"
ON_DISK = "device=256MiB,host=200MiB,ssd=8GiB"


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """No test here measures anything: what was asked for."""
    asked = []

    def calibration(setup, refresh=False):
        asked.append(setup)
        disk = {} if setup.ssd_paths else {"read_bytes_s": 0.0, "write_bytes_s": 0.0}
        return Calibration(COSTS.replace(**disk), 1e12, 1e11)

    monkeypatch.setattr(planner, "calibration", calibration)
    return asked


@pytest.fixture
def trace_path(tmp_path):
    trace = paper.llama_trace(SIZES, TOKENS, 512, 2e12, page_bytes=1 << 20)
    path = tmp_path / "step.trace.json"
    trace_file.save(path, trace, Origin("Toy", "paper", TOKENS))
    return str(path)


@pytest.fixture
def ask(trace_path, capsys):
    """What `strata plan --json` answers, and its status."""

    def asked(*options, memory=BUDGET):
        arguments = ["plan", "--trace", trace_path, "--memory", memory, *options, "--json"]
        status = cli.main(arguments)
        return json.loads(capsys.readouterr().out), status

    return asked


def test_a_step_that_fits_is_described(trace_path, capsys):
    assert cli.main(["plan", "--trace", trace_path, "--memory", BUDGET]) == 0
    text = capsys.readouterr().out
    for words in ("fits", "s a step predicted", "tokens a second", "lower bound", "model.layers.0"):
        assert words in text
    assert "optimizer" in text


def test_a_step_of_days_is_told_in_days_everywhere(trace_path, capsys):
    slow = ["--ssd-read-speed", "50B/s", "--ssd-write-speed", "50B/s"]
    memory = "device=256MiB,host=256MiB,ssd=64GiB"
    assert cli.main(["plan", "--trace", trace_path, "--memory", memory, *slow]) == 0
    verdict, predicted, bound, *_ = capsys.readouterr().out.splitlines()
    days = verdict.partition("fits, but a step takes ")[2].partition(";")[0]
    assert re.fullmatch(r"[\d.,]+ (days|years)", days)
    assert predicted.startswith(f"{days} a step predicted, ")
    assert re.search(r" [1-9][\d.,]* tokens (an hour|a day)$", predicted)
    assert re.match(r"lower bound [\d.,]+ (days|years) ", bound)


def test_a_unit_that_rests_on_the_device_is_told(ask, trace_path, capsys):
    memory = "device=4GiB,host=256MiB"  # nothing else would hold it
    found, status = ask(memory=memory)
    assert status == 0
    held = sum(unit["on_device"] for unit in found["units"])
    assert held > 0
    assert found["plan"]["resting_device_bytes"] > 0
    assert cli.main(["plan", "--trace", trace_path, "--memory", memory]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any("whole" in row.split() for row in rows)


def test_json_says_the_same(ask):
    found, status = ask()
    assert status == 0
    assert found["feasible"]
    assert found["refusal"] == ""
    assert 0 < found["bound"]["seconds"] <= found["step_seconds"] * (1 + 1e-9)
    assert found["percent_of_bound"] == pytest.approx(
        100 * found["bound"]["seconds"] / found["step_seconds"]
    )
    assert found["tokens_per_second"] == pytest.approx(TOKENS / found["step_seconds"])
    assert set(found["lanes"]) == set(probes.LANES)
    assert [unit["name"] for unit in found["units"]][1] == "model.layers.0"


def test_a_budget_that_is_too_small_is_refused_with_the_one_that_would_do(ask):
    found, status = ask(memory="device=16MiB,host=4GiB")
    assert status == 1
    assert not found["feasible"]
    assert "infeasible: device" in found["refusal"]
    assert found["step_seconds"] is None
    enough = found["device_bytes_min"]
    assert ask(memory=f"device={enough}B,host=4GiB")[1] == 0


def test_a_refusal_is_said_in_words(trace_path, capsys):
    assert cli.main(["plan", "--trace", trace_path, "--memory", "device=16MiB,host=4GiB"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("does not fit\ninfeasible: device")
    assert "smallest device budget" in text


def test_a_faster_disk_is_not_slower(ask):
    times = []
    for speed in ("500MB/s", "1GB/s", "4GB/s", "40GB/s"):
        told = ["--ssd-read-speed", speed, "--ssd-write-speed", speed]
        found, status = ask(*told, memory=ON_DISK)
        assert status == 0
        times.append(found["step_seconds"])
    assert all(slow * 1.002 >= fast for slow, fast in itertools.pairwise(times))
    assert times[0] > 1.5 * times[-1]


def test_faster_links_and_optimizers_are_not_slower(ask):
    base = ask()[0]["step_seconds"] * 1.002  # of two choices that are as good it takes either
    assert ask("--upload-speed", "40GB/s", "--download-speed", "40GB/s")[0]["step_seconds"] <= base
    assert ask("--update-speed", "100G")[0]["step_seconds"] <= base
    assert ask("--update-speed", "100M")[0]["step_seconds"] > base


def test_a_faster_device_shortens_computation(ask):
    slow, fast = ask()[0], ask("--compute-speed", "2x")[0]
    assert fast["lanes"]["compute"]["busy_seconds"] < slow["lanes"]["compute"]["busy_seconds"]
    assert fast["step_seconds"] <= slow["step_seconds"]


def test_a_larger_batch_computes_longer_and_holds_more(ask):
    one, four = ask()[0], ask("--tokens-scale", "4")[0]
    assert four["bound"]["compute_seconds"] == pytest.approx(
        4 * one["bound"]["compute_seconds"], rel=0.3
    )
    assert four["tokens_per_second"] == pytest.approx(4 * TOKENS / four["step_seconds"])
    assert four["device_bytes_min"] > one["device_bytes_min"]


@pytest.mark.parametrize("mode", ["keep", "recompute", "swap"])
def test_modes_can_be_forced(ask, mode):
    found, status = ask("--activations", mode, memory="device=8GiB,host=8GiB")
    assert status == 0
    blocks = [u["activation"] for u in found["units"] if "layers" in u["name"]]
    assert set(blocks) == {"swap_host" if mode == "swap" else mode}


def test_slices_can_be_forced(ask):
    found, _ = ask("--split", "4")
    assert {u["slices"] for u in found["units"] if "layers" in u["name"]} == {4}


def test_scaling_scales_what_grows_and_nothing_else():
    trace = paper.llama_trace(SIZES, TOKENS, 512, 1e12)
    half = planner.scaled(trace, 0.5)
    assert half.uses[2].seconds == trace.uses[2].seconds / 2
    assert half.tensors[3].bytes == round(trace.tensors[3].bytes / 2)
    assert half.units[1].slices_max == 4
    assert half.units[1].param_bytes == trace.units[1].param_bytes
    assert planner.scaled(trace, 1.0) == trace


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory", "device=1GiB"], "has no host= budget"),
        (["--memory", "devise=1GiB,host=1GiB"], "did you mean 'device'?"),
        (["--memory", "device=1GiX,host=1GiB"], "did you mean"),
        (["--memory", "8GiB"], "'8GiB' is not a budget such as device=8GiB"),
        (["--compute-speed", "fast"], "'fast' is not a factor"),
        (["--tokens-scale", "0"], "'0' is not a factor"),
        (["--workers", "100000"], "--workers: workers must be from 1 to 1024, not 100000"),
        (["--workers", "9" * 5000], "9999 is more than can be counted"),
        (["--update-speed", "1e400"], "1e400 is more than can be counted"),
        (["--memory", "device=1GiB,host=1GiB,device=2GiB"], "has two device= budgets"),
        (["--memory", "device=0B,host=1GiB"], "leaves nothing for a step to compute in"),
        (["--ssd-read-speed", "0"], "--ssd-read-speed: '0' is no speed"),
        (["--split", "0"], "'0' is not a positive whole number"),
        (["--upload-speed", "12GB/h"], "'12GB/h' is not a speed"),
        (["--update-speed", "many"], "'many' is not a number"),
        (["--device", "cudda"], "unknown device 'cudda': did you mean 'cuda'?"),
        (["--ssd-read-speed", "6"], "write '6GB/s'"),
        (["--memory", "device=96,host=1GiB"], "write '96GiB'"),
        (["--ssd-endurance", "600"], "write '600GiB'"),
        (["--ssd-path", "/nowhere"], "/nowhere is not a folder"),
        (["--ssd-red-speed", "1GB/s"], "did you mean '--ssd-read-speed'?"),
    ],
)
def test_wrong_calls_are_refused_in_words(trace_path, capsys, options, says):
    with pytest.raises(SystemExit) as refused:
        cli.main(["plan", "--trace", trace_path, "--memory", BUDGET, *options])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_a_disk_of_unknown_speed_is_asked_for(trace_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--trace", trace_path, "--memory", ON_DISK])
    assert "--ssd-read-speed and --ssd-write-speed, or --ssd-path" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_named(tmp_path, capsys):
    (tmp_path / "x").write_text("{}")
    assert cli.main(["plan", "--trace", str(tmp_path / "x"), "--memory", BUDGET]) == 1
    assert "is not a strata trace" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [("2G", 2e9), ("989T", 989e12), ("1e3", 1000.0)])
def test_counts(text, count):
    assert choices.parse_count(text) == count


@pytest.fixture
def folder(tmp_path):
    """A Transformers folder without weights."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def estimate(capsys, *options):
    status = cli.main(["estimate", "--batch", "2", "--sequence", "64", *options, "--json"])
    return json.loads(capsys.readouterr().out), status


def test_a_model_without_weights_is_estimated(folder, capsys):
    found, status = estimate(capsys, "--model", folder, "--memory", "device=64MiB,host=64MiB")
    assert status == 0
    assert found["tokens_per_second"] == pytest.approx(128 / found["step_seconds"])
    parameters = sum(
        p.numel() for p in LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).parameters()
    )
    plan = found["plan"]
    assert plan["resting_host_bytes"] + plan["resting_device_bytes"] >= 14 * parameters


def test_an_estimate_that_does_not_fit_says_what_would(folder, capsys):
    small = "device=256KiB,host=64MiB"
    found, status = estimate(capsys, "--model", folder, "--memory", small)
    assert status == 1
    assert found["device_bytes_min"] > 256 << 10
    enough = f"device={found['device_bytes_min']}B,host=64MiB"
    assert estimate(capsys, "--model", folder, "--memory", enough)[1] == 0


def test_what_finetune_does_by_itself_is_estimated(folder, capsys):
    def tell(device, batch):
        memory = f"device={device},host=64MiB"
        return estimate(capsys, "--model", folder, "--memory", memory, "--batch", str(batch))[0]

    assert tell("64MiB", 2)["changes"] == []
    many = tell("256MiB", 1024)  # 128 MiB of logits in float32
    assert many["changes"] == ["the loss is computed without logits"]
    assert many["device_bytes_min"] < 4 * 512 * 64 * 1024  # those in float32
    assert tell("1KiB", 2)["changes"] == []  # thousands of tiles would not help
    small = tell("60KiB", 2)  # the embedding and the head have 64 KiB each
    assert "lm_head is cut into 9 tiles" in small["changes"]


def test_flops_and_bandwidth_of_another_device_can_be_told(folder, capsys):
    def seconds(*told):
        found, _ = estimate(capsys, "--model", folder, "--memory", "device=64MiB,host=64MiB", *told)
        return found["lanes"]["compute"]["busy_seconds"]

    assert seconds("--flops", "1G") == pytest.approx(2 * seconds("--flops", "2G"), rel=0.01)
    assert seconds("--flops", "1T", "--device-bandwidth", "1GB/s") > 10 * seconds("--flops", "1T")


@pytest.fixture
def gpu(monkeypatch):
    """There is one, with the number 0."""
    monkeypatch.setattr(device, "why_not", lambda name: "" if name == "cuda:0" else "it is gone")
    monkeypatch.setattr(device, "free_bytes", lambda name: None if name == "host" else 80 << 30)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("word", "name"), [(None, "cuda:0"), ("cuda", "cuda:0"), ("cpu", "host")])
def test_figures_are_those_of_the_device_that_wrap_would_take(
    word, name, folder, trace_path, measured, capsys
):
    told = ["--device", word] if word else []
    estimate(capsys, "--model", folder, "--memory", "device=64MiB,host=64MiB", *told)
    cli.main(["plan", "--trace", trace_path, "--memory", BUDGET, *told])
    assert [setup.device for setup in measured] == [name, name]
    assert measured[0].workers == configure.default_workers(name)
    assert (measured[0].page_bytes >= 2 << 20) is (name != "host")  # no GPU maps less


@pytest.mark.usefixtures("gpu")
def test_a_device_that_cannot_be_used_is_refused_with_the_reason(trace_path, measured, capsys):
    command = ["plan", "--trace", trace_path, "--memory", BUDGET, "--device", "cuda:1"]
    assert cli.main(command) == 1
    assert "device='cuda:1' cannot be used: it is gone" in capsys.readouterr().err
    assert measured == []


def test_traffic_is_what_the_device_s_memory_does(folder, capsys, monkeypatch):
    def seconds(bytes_s):
        found = Calibration(COSTS.replace(read_bytes_s=0.0, write_bytes_s=0.0), 1e12, bytes_s)
        monkeypatch.setattr(planner, "calibration", lambda setup: found)
        memory = ["--memory", "device=64MiB,host=64MiB"]
        return estimate(capsys, "--model", folder, *memory)[0]["lanes"]["compute"]["busy_seconds"]

    assert seconds(1e9) > 5 * seconds(1e11)


def test_updates_and_moments_change_what_rests(folder, capsys):
    def resting(*told):
        memory = ["--memory", "device=64MiB,host=64MiB"]
        found, status = estimate(capsys, "--model", folder, *memory, *told)
        assert status == 0
        plan, buffers = found["plan"], (64 << 20) - found["budgets"]["host_bytes"]
        return plan["resting_host_bytes"] + plan["resting_device_bytes"] + buffers

    # 14 bytes a parameter, of which 8 are moments; 12 and 16 with other updates, and some room.
    exact = resting()
    assert resting("--update", "in_backward") < 0.92 * exact
    assert resting("--update", "lock-free:1") > 1.1 * exact
    assert resting("--state-dtype", "8bit") < 0.7 * exact  # of 8 / 14, in whole pages
    assert resting("--state-dtype", "bfloat16") < 0.85 * exact


def test_a_step_of_years_is_said_ahead_of_everything(folder, capsys):
    told = ["--model", folder, "--batch", "2", "--sequence", "64", "--steps", "100"]
    slow = ["--memory", "device=64MiB,host=64MiB", "--flops", "0.0001k"]
    assert cli.main(["estimate", *told, *slow]) == 0
    text = capsys.readouterr().out
    assert text.startswith("fits, but a step takes ")
    assert " years; the smallest" in text.splitlines()[0]
    assert "100 steps take " in text


def test_too_little_host_memory_is_told_of_an_ssd(trace_path, ask, capsys):
    small = "device=256MiB,host=200MiB"
    found, status = ask(memory=small)
    assert status == 1
    assert found["ssd_bytes_enough"] > 0
    assert cli.main(["plan", "--trace", trace_path, "--memory", small]) == 1
    advice = capsys.readouterr().out.splitlines()[-1]
    assert advice.startswith("give it an SSD: ssd=")
    size = advice.split("ssd=")[1].split()[0]
    speeds = ["--ssd-read-speed", "2GB/s", "--ssd-write-speed", "2GB/s"]
    assert ask(*speeds, memory=f"{small},ssd={size}")[1] == 0


def test_what_is_written_is_held_against_the_drive_s_endurance(trace_path, ask, capsys):
    speeds = ["--ssd-read-speed", "2GB/s", "--ssd-write-speed", "2GB/s"]
    told = [*speeds, "--ssd-endurance", "600TB", "--steps", "1000000"]
    found, _ = ask(*told, memory=ON_DISK)
    assert found["ssd_bytes_per_step"] == found["lanes"]["write"]["bytes"] > 0
    assert len(found["wear"]) == 3
    cli.main(["plan", "--trace", trace_path, "--memory", ON_DISK, *told])
    text = capsys.readouterr().out
    assert "a step are written to the SSD" in text
    assert "a drive of 600 TB endurance is worn out in" in text
    assert "warning: this run takes" in text
    assert ask()[0]["wear"] == []


def test_budgets_beyond_this_machine_are_remarked(ask):
    found, status = ask(memory="device=1GiB,host=900TiB")
    assert status == 0  # on paper
    assert "on this machine it would be refused: " in found["notes"][0]


def test_nothing_of_a_large_model_takes_memory(capsys):
    large = LlamaConfig(num_hidden_layers=4, hidden_size=4096)  # 1.1 G parameters
    before = torch.get_default_dtype()
    from strata._cli import estimate as module

    memory = {"device": 1 << 50, "host": 1 << 50, "ssd": 0}
    model, step = module.count(
        module.Step(large, 1, 2048, memory, "host", Options(dtype=torch.bfloat16))
    )
    assert sum(p.numel() for p in model.parameters()) > 10**9
    assert max(use.peak_bytes for use in step.uses) > 2**30
    assert torch.get_default_dtype() == before
