"""Loops of Transformers and Accelerate, and `strata finetune`, under torchrun: two processes, one
thread each. What the processes do is in torchrun_programs.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torchrun_programs as programs
from finetune_runs import arguments, lines, tensors
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.thorough

HOME = Path(__file__).parent
RANKS = 2
TIMEOUT_S = 600.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"} | {
    "PYTHONPATH": os.pathsep.join([str(HOME), *sys.path]),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    """torchrun, to be followed by what it shall start."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        *("--standalone", "--local-addr", "127.0.0.1", "--log-dir", str(tmp_path / "logs")),
    ]


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the test alone sends it signals
        **options,
    )


def end(run: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed. A run that hangs is killed, with its ranks, and the test fails."""
    try:
        return run.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun ends its processes
        said = run.communicate()
        raise AssertionError(f"hangs: {said}") from None


def ran(command: list[str], **options: Any) -> str:
    """What it printed, of a run that went well."""
    run = start(command, **options)
    out, errors = end(run)
    assert run.returncode == 0, out + errors
    return out + errors


def on_ranks(launcher: list[str], name: str, folder: Path) -> list[dict[str, Any]]:
    """What a program of torchrun_programs.py returned, by rank."""
    ran([*launcher, str(HOME / "torchrun_programs.py"), name, str(folder)])
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


def same(found: list[dict[str, Any]], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of all ranks, which found the same."""
    for name in found[0].keys() - set(but):
        assert all(of[name] == found[0][name] for of in found), name
    return found[0]


def test_trainers_give_the_bits_of_one_process(launcher: list[str], tmp_path: Path) -> None:
    found = same(on_ranks(launcher, "trainers", tmp_path))
    alone = programs.trainers(tmp_path / "alone", ranks=1)
    for name in ("plain", "mixed", "snapped", "plain norms"):
        assert found[name] == alone[name], name
    for name in ("plain", "mixed", "snapped"):
        assert found[f"{name} gone on"] == found[name]
        read = LlamaForCausalLM.from_pretrained(tmp_path / "trainers" / f"{name}-model")
        assert programs.hash_of(read) == found[name]
    assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-6)
    assert found["plain losses"] == pytest.approx(alone["plain losses"], rel=1e-4)
    # Gradients are clipped, and losses are means over all tokens, as the Trainer's are under DDP.
    assert min(found["plain norms"]) > 0.3
    assert found["plain to ddp"] < 1e-6
    assert found["norms to ddp"] < 1e-4


def test_what_the_mixin_is_told_holds_for_ranks(launcher: list[str], tmp_path: Path) -> None:
    found = same(on_ranks(launcher, "kinds", tmp_path))
    alone = programs.kinds(tmp_path / "alone", ranks=1)
    for name in ("autocast", "half"):
        assert found[name] == alone[name], name
    assert found["autocast"] != found["half"]
    for name in ("best", "best of snapshots", "best of late snapshots"):
        assert found[f"{name}, its step"] == alone[f"{name}, its step"], name
        assert found[name] < 1e-6, name


def test_a_loop_of_accelerate_gives_the_bits_of_one_process(
    launcher: list[str], tmp_path: Path
) -> None:
    found = same(on_ranks(launcher, "accelerated", tmp_path))
    assert found["whole"] == programs.accelerated(tmp_path / "alone", ranks=1)["whole"]
    assert found["gone on"] == found["whole"]
    assert found["to ddp"] < 1e-6


def test_what_ranks_cannot_do_is_refused_on_all_of_them(
    launcher: list[str], tmp_path: Path
) -> None:
    found = same(on_ranks(launcher, "refusals", tmp_path))
    assert "is in DistributedDataParallel" in found["wrap of DDP"]
    assert "model.module" in found["wrap of DDP"]
    assert "is in FSDPModule" in found["wrap of FSDP"]
    assert "leave fully_shard() out" in found["wrap of FSDP"]
    for where in ("DDP of wrapped", "DDP above it", "DDP was there"):
        assert "is in DistributedDataParallel" in found[where]
        assert "leave it out" in found[where]
    assert "dtype=torch.bfloat16" in found["plain autocast"]
    assert found["DDP of unwrapped"] == "nothing"
    assert "over 2 processes, and 1 of them train this model" in found["Accelerate of some"]
    assert "leave it out, or write the loop without the Trainer" in found["Trainer of some"]


def test_training_arguments_that_see_one_process_are_refused(
    launcher: list[str], tmp_path: Path
) -> None:
    found = same(on_ranks(launcher, "without_cpu", tmp_path))
    assert "2 processes of which these training arguments see one" in found["mixin"]
    assert "give use_cpu=True" in found["mixin"]
    assert "Accelerate sees one process" in found["plain"]
    assert "TrainingArguments(use_cpu=True)" in found["plain"]


# `strata finetune` -------------------------------------------------------------------------------


@pytest.fixture
def tiny(place: Path) -> Path:
    """The place, with a model that draws nothing: ranks would draw other numbers than one alone."""
    config = LlamaConfig.from_pretrained(place / "tiny")
    config.attention_dropout = 0.0
    config.save_pretrained(place / "tiny")
    return place


def told(place: Path, output: str, ranks: int, **more: Any) -> list[str]:
    """A run of four micro-batches a step, over all ranks."""
    given = {
        "accumulation": 4 // ranks, "batch": 1, "device-memory": "1MiB", "host-memory": "16MiB",
        "ssd-memory": "64MiB",
    }  # fmt: skip
    given |= more
    return arguments(place, output, **given)


def finetune(launcher: list[str], options: list[str]) -> list[str]:
    return [*launcher, "-m", "strata", *options]


def alone(options: list[str]) -> list[str]:
    return [sys.executable, "-m", "strata", *options]


def equal(one: Path, other: Path) -> bool:
    """Whether two folders have the same tensors, to the bit."""
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_finetune_gives_the_model_of_one_process(launcher: list[str], tiny: Path) -> None:
    out = ran(finetune(launcher, told(tiny, "two", RANKS)))
    ran(alone(told(tiny, "one", 1)))
    assert equal(tiny / "two" / "model", tiny / "one" / "model")
    # Rank 0 alone speaks, and writes.
    assert out.count("held-out loss after step 6") == 1
    assert out.count("step 6/6") == 1
    assert "for each of 2 ranks" in out
    steps = [[(row["step"], "loss" in row) for row in lines(tiny / run)] for run in ("two", "one")]
    assert steps[0] == steps[1]
    seen = [lines(tiny / run)[-1]["num_input_tokens_seen"] for run in ("two", "one")]
    assert seen[0] == seen[1]
    assert sorted(p.name for p in (tiny / "two").iterdir()) == sorted(
        p.name for p in (tiny / "one").iterdir()
    )


def test_finetune_of_adapters_gives_those_of_one_process(launcher: list[str], tiny: Path) -> None:
    ran(alone(told(tiny, "base", 1, steps=1)))
    more = {"model": tiny / "base" / "model", "lora": "r=4", "steps": 3}
    ran(finetune(launcher, told(tiny, "two", RANKS, **more)))
    ran(alone(told(tiny, "one", 1, **more)))
    assert equal(tiny / "two" / "model", tiny / "one" / "model")


def await_checkpoint(run: subprocess.Popen[str], output: Path) -> None:
    """Returns when the run has written the second one, or a later one."""
    until = time.monotonic() + TIMEOUT_S
    while not [f for f in output.glob("checkpoint-*/trainer_state.json") if "-2/" not in str(f)]:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def process_of(run: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Of those that a torchrun has started."""
    (found,) = [
        child
        for child in psutil.Process(run.pid).children()
        if child.environ().get("RANK") == str(rank)
    ]
    return found


@pytest.mark.parametrize("saves", ["save-every", "snapshot-every"])
@pytest.mark.parametrize("victim", [0, 1])
def test_finetune_goes_on_after_a_rank_was_killed(
    launcher: list[str], tiny: Path, victim: int, saves: str
) -> None:
    (tiny / "drive").mkdir()
    more = {"steps": 40, saves: 2, "eval-every": 0, "ssd-path": "drive"}
    ran(finetune(launcher, told(tiny, "whole", RANKS, **more)), cwd=tiny)
    run = start(finetune(launcher, told(tiny, "cut", RANKS, **more)), cwd=tiny)
    await_checkpoint(run, tiny / "cut")
    process_of(run, victim).kill()
    out, errors = end(run)
    assert run.returncode == 1
    assert "step 40/40" not in out
    assert f"strata: rank {1 - victim}: rank {victim} has died" in errors, errors
    assert not (tiny / "cut" / "model").exists()

    again = ["finetune", "--output", str(tiny / "cut"), "--resume"]
    ran(finetune(launcher, again), cwd=tiny)
    assert equal(tiny / "cut" / "model", tiny / "whole" / "model")
    assert [row["step"] for row in lines(tiny / "cut") if "loss" in row] == list(range(1, 41))


@pytest.mark.parametrize("update", ["lock-free:0", "lock-free:1"])
def test_finetune_goes_on_from_snapshots_of_updates_that_lag(
    launcher: list[str], tiny: Path, update: str
) -> None:
    """With the bits of a whole run, where no update lags."""
    (tiny / "drive").mkdir()
    more = {"steps": 40, "snapshot-every": 2, "eval-every": 0, "update": update}
    more["ssd-path"] = tiny / "drive"
    if update == "lock-free:0":
        ran(finetune(launcher, told(tiny, "whole", RANKS, **more)))
    run = start(finetune(launcher, told(tiny, "cut", RANKS, **more)))
    await_checkpoint(run, tiny / "cut")
    process_of(run, 0).kill()
    end(run)
    assert list((tiny / "cut").glob("checkpoint-*/strata/step-*"))

    ran(finetune(launcher, ["finetune", "--output", str(tiny / "cut"), "--resume"]))
    rows = [row for row in lines(tiny / "cut") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    if update == "lock-free:0":
        assert equal(tiny / "cut" / "model", tiny / "whole" / "model")


@pytest.mark.parametrize("saves", ["save-every", "snapshot-every"])
def test_ctrl_c_ends_all_ranks_with_a_checkpoint(
    launcher: list[str], tiny: Path, saves: str
) -> None:
    (tiny / "drive").mkdir()
    more = {"steps": 400, saves: 2, "eval-every": 0, "ssd-path": tiny / "drive"}
    run = start(finetune(launcher, told(tiny, "out", RANKS, **more)))
    await_checkpoint(run, tiny / "out")
    os.kill(run.pid, signal.SIGINT)
    out, errors = end(run)
    assert out.count("stopping in a moment") == 1, out + errors
    assert out.count("to continue: strata finetune --resume") == 1
    (checkpoint,) = (tiny / "out").glob("checkpoint-*")
    assert len(list(checkpoint.glob("rng_state_*.pth"))) == RANKS

    # Another number of ranks would see other batches.
    again = start(alone(["finetune", "--output", str(tiny / "out"), "--resume"]))
    _, errors = end(again)
    assert again.returncode == 1
    assert "2 ranks trained the run" in errors
    assert "torchrun --nproc-per-node 2" in errors


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"sequence": 2000, "batch": 4, "device-memory": "1GiB"},
            "less than a batch for each of 2 ranks",
        ),
        ({"data": "nowhere"}, "no data at nowhere"),
        ({"device-memory": "64KiB"}, "infeasible"),
    ],
)
def test_finetune_refuses_by_name_and_nobody_hangs(
    launcher: list[str], tiny: Path, more: dict[str, Any], words: str
) -> None:
    run = start(finetune(launcher, told(tiny, "out", RANKS, **more)))
    _, errors = end(run)
    assert run.returncode == 1
    said = [line for line in errors.splitlines() if line.startswith("strata: rank ")]
    assert said, errors
    assert any(words in line for line in said), errors
