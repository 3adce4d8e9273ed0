"""The main job, end to end on a tiny model: train, stop, continue, save, and refuse nonsense."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finetune_runs import ENVIRONMENT, LINES, arguments, lines, tensors, wrong
from strata._cli import main as cli
from strata._cli.finetune import run as finetune
from strata._cli.finetune.interrupt import Interrupt
from strata._cli.finetune.options import Options, parse
from strata._cli.finetune.trainer import Finetuner
from strata._config import machine
from strata._profiling import probes
from strata.nn import causal_lm
from strata.nn.causal_lm import ChunkedLoss
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from variants import thorough


def test_a_run_learns_and_leaves_a_model_that_transformers_loads(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(place, steps=20)) == 0
    out = place / "out"
    said = capsys.readouterr().out
    for expected in ("step 20/20", "held-out loss", "tokens/s", "plain PyTorch", "perplexity"):
        assert expected in said
    assert lines(out)[-2]["strata_ssd_gib"] > 0
    evaluations = [r["eval_loss"] for r in lines(out) if "eval_loss" in r]
    assert evaluations[-1] < evaluations[0] - 0.5
    assert [r["step"] for r in lines(out) if "loss" in r] == list(range(1, 21))
    assert (out / "progress.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["report", str(out / "report.json")]) == 0
    assert "waiting for" in capsys.readouterr().out
    assert list((place / "disk").iterdir()) == []

    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    tokens = tokenizer(LINES, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(tokens[0]) == LINES
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss < evaluations[0] - 0.5


def test_a_resumed_run_is_bitwise_equal_to_one_that_went_through(place: Path) -> None:
    assert cli.main(arguments(place, "whole", steps=6)) == 0
    # A run that was killed between its checkpoint and its end, then continued with other budgets.
    saving = arguments(place, "cut", steps=6, **{"save-every": 2, "eval-every": 0})
    script = (
        "import sys, os; from strata._cli import main as cli\n"
        "from strata._cli.finetune.trainer import Finetuner\n"
        "train = Finetuner.training_step\n"
        "def dying(self, *batch):\n"
        "    if self.state.global_step == 3: os._exit(9)\n"
        "    return train(self, *batch)\n"
        "Finetuner.training_step = dying\n"
        "cli.main(sys.argv[1:])\n"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script, *saving], check=False, env=ENVIRONMENT
        ).returncode
        == 9
    )
    (place / "text" / "0.txt").unlink()  # the run has its own copy
    output = f"--output={place / 'cut'}"
    assert cli.main(["finetune", "--resume", output, "--device-memory=4MiB"]) == 0

    whole, cut = tensors(place / "whole" / "model"), tensors(place / "cut" / "model")
    assert whole.keys() == cut.keys()
    for name in whole:
        assert torch.equal(whole[name], cut[name]), name
    losses = [
        {r["step"]: r["loss"] for r in lines(place / f) if "loss" in r} for f in ("whole", "cut")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx512_bf16"}, "bfloat16"), thorough({"avx2"}, "float32")]
)
def test_the_same_command_computes_in_the_same_dtype_however_busy_the_machine(
    place: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: str
) -> None:
    measured = iter([1e9, 100e9] * 50)  # as on a busy machine
    monkeypatch.setattr(probes, "matmul_flops", lambda dtype, device: next(measured))
    monkeypatch.setattr(machine, "processor_flags", lambda: flags)
    more: dict[str, Any] = {"device-memory": "2MiB", "host-memory": "4MiB", "save-every": 1}
    for name in ("one", "two"):
        assert cli.main(arguments(place, name, steps=1, dtype=None, **more)) == 0
        assert yaml.safe_load((place / name / "options.yaml").read_text())["dtype"] == dtype
    # A run keeps what it began with.
    monkeypatch.setattr(machine, "processor_flags", lambda: {"avx512_bf16"} - flags)
    assert cli.main(["finetune", "--resume", f"--output={place / 'one'}", "--steps=2"]) == 0
    assert yaml.safe_load((place / "one" / "options.yaml").read_text())["dtype"] == dtype


def test_a_device_that_is_too_small_is_refused_before_anything_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*_: Any) -> None:
        raise AssertionError("the text was read")

    monkeypatch.setattr(finetune, "prepare", prepare)
    more = {"device-memory": "256KiB", "batch": 16, "sequence": 128}
    said = wrong(capsys, arguments(place, **more))
    assert "the device budget is 256.0 KiB, and a step of 16 by 128 tokens needs about" in said
    assert "MiB would do" in said
    said = wrong(capsys, arguments(place, **{"host-memory": "900TiB"}))
    assert "this machine has" in said
    assert not (place / "out" / "options.yaml").exists()


def test_what_killed_processes_left_goes_before_free_space_is_looked_at(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = place / "disk"
    (disk / "strata-0123456789abcdef.pages").write_bytes(b"x" * 4096)
    (disk / "strata.lock").write_text("999999999 pid:[1]\nstrata-0123456789abcdef.pages\n")
    seen: list[list[str]] = []

    def free(_: object) -> int:
        seen.append([file.name for file in disk.iterdir()])
        return 1 << 30

    monkeypatch.setattr(machine, "free_disk_bytes", free)
    more = {"device-memory": "256KiB", "batch": 16, "sequence": 128, "ssd-memory": None}
    assert "the device budget is 256.0 KiB" in wrong(capsys, arguments(place, **more))
    assert seen[0] == []
    assert list(disk.iterdir()) == []


def test_what_a_run_writes_is_said_and_warned_of(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    told = arguments(place, steps=4, **{"ssd-endurance": "10MB", "host-memory": "704KiB"})
    with caplog.at_level("INFO", "strata"):
        assert cli.main(told) == 0
    # When a plan says how long a step takes.
    (a_day,) = [line for line in capsys.readouterr().out.splitlines() if " a day" in line]
    assert re.fullmatch(r"[0-9.]+ [kM]B a step are written to the SSD, [0-9.,]+ [GT]B a day", a_day)
    assert "a step are written to the SSD" in caplog.text
    assert "a drive of 10 MB endurance is worn out in" in caplog.text
    assert "warning: this run takes" in caplog.text


def test_many_logits_are_never_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for chunk_bytes in (causal_lm.CHUNK_BYTES, 0):
        monkeypatch.setattr(causal_lm, "CHUNK_BYTES", chunk_bytes)
        assert cli.main(arguments(place, f"out{chunk_bytes}", steps=3)) == 0
        told = lines(place / f"out{chunk_bytes}")
        losses.append([line["loss"] for line in told if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_loss_is_chunked_only_where_the_model_leaves_its_logits_alone() -> None:
    class Louder(LlamaForCausalLM):
        def forward(self, input_ids: Any, labels: Any, use_cache: bool) -> Any:
            logits = 2 * self.lm_head(self.model(input_ids).last_hidden_state)
            return self.loss_function(logits, labels, 320)

    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    for kind, batch, chunked in (
        (LlamaForCausalLM, 64, True),
        (LlamaForCausalLM, 1, False),  # too few
        (Louder, 64, False),
    ):
        with torch.device("meta"):
            model = kind(config)
        assert causal_lm.chunk_many(model, batch * 512) == chunked
        assert isinstance(getattr(model, "_loss_function", None), ChunkedLoss) == chunked
        assert model.training


def test_a_terminal_gets_a_bar(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(arguments(place, steps=2)) == 0
    said, bar = capsys.readouterr()
    assert "step 2/2" not in said
    for expected in ("2/2", "tokens/s", "loss", "512 KiB"):
        assert expected in bar
    assert "held-out loss after step 2" in said


@pytest.mark.thorough
def test_a_saved_model_is_trained_further(place: Path) -> None:
    assert cli.main(arguments(place, "first", steps=10)) == 0
    before = lines(place / "first")[-1]["eval_loss"]
    again = arguments(place, "second", steps=1, model=place / "first" / "model", lr=None)
    assert cli.main(again) == 0
    first = lines(place / "second")[0]["eval_loss"]
    assert first == pytest.approx(before, abs=0.02)
    assert (place / "second" / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "more",
    [
        {"update": "in_backward", "accumulation": 1, "state-dtype": "bfloat16"},
        {"update": "lock-free:2", "state-dtype": "8bit", "host-memory": "4MiB"},
    ],
)
def test_other_updates_learn_too(place: Path, more: dict[str, Any]) -> None:
    assert cli.main(arguments(place, steps=12, **more)) == 0
    losses = [r["eval_loss"] for r in lines(place / "out") if "eval_loss" in r]
    assert losses[-1] < losses[0] - 0.2


def test_float16_scales_its_loss_and_goes_on_with_the_same_scale(place: Path) -> None:
    common = {"dtype": "float16", "save-every": 2, "eval-every": 0, "steps": 4}

    def scaler(step: int) -> dict[str, Any]:
        file = place / "out" / f"checkpoint-{step}" / "scaler.pt"
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]

    def save_and_stop(self: Any, *batch: Any) -> Any:
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return train(self, *batch)

    train = Finetuner.training_step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Finetuner, "training_step", save_and_stop)
        assert cli.main(arguments(place, **common)) == 130
    saved = scaler(2)
    assert saved["scale"] > 1
    assert cli.main(["finetune", "--resume", f"--output={place / 'out'}"]) == 0
    after = scaler(4)
    kept = after["_growth_tracker"] - saved["_growth_tracker"]
    assert kept == 2 or after["scale"] < saved["scale"]


@pytest.mark.thorough
def test_ctrl_c_saves_says_how_to_continue_and_leaves_nothing(place: Path) -> None:
    command = [sys.executable, "-u", "-m", "strata", *arguments(place, steps=100_000)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    metrics = place / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (metrics.exists() and len(lines(place / "out")) > 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "stopping in a moment" in said
    assert f"strata finetune --resume --output {place / 'out'}" in said
    assert list((place / "disk").iterdir()) == []
    step = max(r["step"] for r in lines(place / "out"))
    assert (
        cli.main(["finetune", "--resume", f"--output={place / 'out'}", f"--steps={step + 1}"]) == 0
    )


def test_the_second_ctrl_c_stops_at_once_and_the_handler_comes_back() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(said.append) as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        assert "again to stop at once" in said[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": "llama-111m"}, "did you mean 'llama-110m'"),
        ({"device-memory": "64MiBB"}, "unknown unit 'MiBB'"),
        ({"device-memroy": "64MiB"}, "did you mean '--device-memory'"),
        ({"dtype": "int8"}, "invalid choice: 'int8'"),
        ({"ssd-path": "/nowhere"}, "/nowhere is not a folder"),
        ({"ssd-path": None}, "--ssd-memory needs --ssd-path"),
        ({"data": "/nowhere"}, "no data at /nowhere"),
        ({"sequence": 100_000, "device-memory": None}, "less than a batch"),
        ({"device-memory": "8KiB"}, "device"),
        ({"data": None}, "--data is needed"),
        ({"data-limit": "100B"}, "nothing is left to hold out"),
        ({"data-limit": "0B"}, "--data-limit: '0B' is nothing"),
        ({"ssd-endurance": "0TB"}, "--ssd-endurance: '0TB' is nothing"),
        ({"vocabulary": 10}, "--vocabulary 257 is the smallest"),
        ({"update": "in-backward"}, "did you mean 'in_backward'"),
        ({"update": "lock-free:x"}, "a number of steps"),
        ({"update": "in_backward"}, "update='on_step' with gradient_accumulation_steps"),
        ({"update": "lock-free:1", "dtype": "float16"}, "take bfloat16, or --update on_step"),
        (
            {"update": "lock-free:99999999999"},
            "--update: max_staleness must be 65536 steps at most",
        ),
        ({"workers": 100_000}, "--workers: workers must be from 1 to 1024, not 100000"),
        ({"seed": 2**64}, "--seed: 18446744073709551616 is more than can be counted"),
        ({"state-dtype": "4bit"}, "invalid choice: '4bit'"),
        ({"steps": "abc"}, "--steps: 'abc' is not a positive whole number"),
        ({"batch": 0}, "--batch: '0' is not a positive whole number"),
        ({"seed": "x"}, "--seed: 'x' is not a whole number of at least 0"),
        ({"held-out": 2}, "--held-out: '2' is not between 0 and 1"),
        ({"lr": "fast"}, "--lr: 'fast' is not a number of at least 0"),
        ({"split": 2, "activations": "keep"}, "activations='keep' rules out"),
    ],
)
def test_a_wrong_call_is_refused_in_words(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    assert expected in wrong(capsys, arguments(place, **change))


def test_an_earlier_run_is_not_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no data" in wrong(capsys, arguments(place, data="/nowhere"))  # that was not a run
    assert cli.main(arguments(place, steps=1)) == 0
    output = f"--output={place / 'out'}"
    assert "no complete checkpoint" in wrong(capsys, ["finetune", "--resume", output])
    assert cli.main([*arguments(place, steps=1, **{"save-every": 1}), "--overwrite"]) == 0
    capsys.readouterr()
    assert "holds an earlier run" in wrong(capsys, arguments(place))
    assert "seed was 0" in wrong(capsys, ["finetune", "--resume", output, "--seed=5"])
    assert "there is no run" in wrong(capsys, ["finetune", "--resume", "--output=/nowhere"])
    assert cli.main([*arguments(place, steps=1), "--overwrite"]) == 0


def test_commands_are_listed_and_the_nearest_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # not within a name
    assert cli.main(["--help"]) == 0
    assert "finetune" in capsys.readouterr().out
    assert "did you mean 'finetune'" in wrong(capsys, ["finetun"])
    with pytest.raises(SystemExit) as caught:
        cli.main(["finetune", "--help"])
    assert caught.value.code == 0
    assert "llama-1b" in capsys.readouterr().out


def test_every_option_has_a_flag_and_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--model=a", "--data", "b", "c"]
    options = parse(told, None)
    given = {"model": "a", "data": ("b", "c")}
    assert options == Options().replaced("start", **given)
    with pytest.raises(SystemExit):
        parse(["--help"], None)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"--{name.replace('_', '-')}" in shown for name in options.flat())
    assert "(default: 512)" in shown
    assert not any(odd in shown for odd in ("None)", "(default: )", "''"))
    updates = parse([*told, "--max-grad-norm=0"], None).updates()
    assert updates["max_grad_norm"] is None
    assert updates["state_dtype"] is torch.float32
    updates = parse([*told, "--update=in_backward", "--state-dtype=8bit"], None).updates()
    assert (updates["max_unit_norm"], updates["skip_nonfinite"]) == (1.0, False)
    assert updates["state_dtype"] == "8bit"
    assert parse([*told, "--update=lock-free:0"], None).updates()["skip_nonfinite"]


def test_options_come_from_a_file_and_the_command_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a\ndata: [b, c]\nlr: 1e-4\ndevice-memory: 256MiB\noverwrite: true\n")
    options = parse(["--lr=0.5", f"--config={file}", "--data", "d"], None)
    assert options.start.data == ("d",)
    assert (options.training.lr, options.memory.device_memory) == (0.5, "256MiB")
    assert options.results.overwrite
    options.save(tmp_path)
    again = parse([f"--config={tmp_path / 'options.yaml'}"], None)
    run_alone = {"config": None, "overwrite": False}
    assert again.flat() | run_alone == options.flat() | run_alone
    for text, expected in (
        ("modle: a", "unknown option 'modle': did you mean 'model'"),
        ("device_memory: 256", "'256' has no unit"),
        ("- a", "holds no options"),
        ("a: [", "is not YAML"),
    ):
        file.write_text(text)
        assert expected in wrong(capsys, ["finetune", f"--config={file}"])
