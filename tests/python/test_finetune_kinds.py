"""What is trained and on what: adapters, chats, models with code of their own. How runs that end
early go on."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import ENVIRONMENT, arguments, lines, tensors, wrong
from safetensors.torch import load_file
from strata._cli import main as cli
from strata._cli.finetune import run as finetune
from strata._cli.finetune.trainer import Finetuner
from transformers import AutoModelForCausalLM, AutoTokenizer
from variants import thorough

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LORA = "r=4,alpha=8,dropout=0.1,targets=q_proj+down_proj"


@pytest.fixture
def saved(place: Path) -> Path:
    """A saved model whose tokenizer knows chats, and chats beside it."""
    assert cli.main(arguments(place, "base", steps=2)) == 0
    model = place / "base" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    with open(place / "chats.jsonl", "w") as file:
        for i in range(60):
            turns = [
                ("user", f"what is {i} plus one"),
                ("assistant", f"it is {i + 1}, says the fox"),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return model


def adapter(place: Path, output: str) -> dict[str, torch.Tensor]:
    return load_file(place / output / "model" / "adapter_model.safetensors")


def test_adapters_of_a_saved_model_learn_chats(
    place: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"model": saved, "data": place / "chats.jsonl", "lora": LORA, "steps": 12}
    base = tensors(saved)
    assert cli.main(arguments(place, **told)) == 0
    assert "trained" in capsys.readouterr().out
    losses = [r["eval_loss"] for r in lines(place / "out") if "eval_loss" in r]
    assert losses[-1] < losses[0] - 0.01
    names = {path.name for path in (place / "out" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.startswith("model")]
    config = json.loads((place / "out" / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert Path(config["base_model_name_or_path"]) == saved
    assert len(adapter(place, "out")) == 8  # A and B of two modules in two layers
    model = AutoModelForCausalLM.from_pretrained(place / "out" / "model")
    for name, value in base.items():
        before, dot, leaf = name.rpartition(".")
        layer: Any = model.get_submodule(before)
        kept = getattr(getattr(layer, "base_layer", layer), leaf)
        assert torch.equal(kept.detach().to(value.dtype), value), name + dot


@pytest.mark.parametrize("frozen", [thorough("as-is"), "nf4"])
def test_adapters_go_on_to_the_same_bits(
    place: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, frozen: str
) -> None:
    told: dict[str, Any] = {"model": saved, "data": place / "chats.jsonl", "save-every": 2}
    told |= {"lora": LORA, "device-memory": "2MiB", "host-memory": "2MiB"}  # not in slices
    told |= {"frozen": frozen}
    assert cli.main(arguments(place, "whole", **told)) == 0
    with monkeypatch.context() as patched:
        ends_at(patched, 3)
        assert cli.main(arguments(place, "cut", **told)) == 130
    assert cli.main(["finetune", "--resume", f"--output={place / 'cut'}"]) == 0
    whole, cut = adapter(place, "whole"), adapter(place, "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    # And a run of all parameters takes the place of one of adapters, whose files would be loaded.
    assert cli.main([*arguments(place, "cut", model=saved, steps=1), "--overwrite"]) == 0
    assert not (place / "cut" / "model" / "adapter_config.json").exists()


def ends_at(patched: pytest.MonkeyPatch, step: int, signals: int = 0) -> None:
    """At a step Ctrl-C comes so many times, or the second one at once."""
    train = Finetuner.training_step

    def interrupted(self: Any, *batch: Any) -> Any:
        if self.state.global_step == step:
            if not signals:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return train(self, *batch)

    patched.setattr(Finetuner, "training_step", interrupted)


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ({"steps": 5, "accumulation": 1}, 1),
        # 13 batches are an epoch, whose last step has one: it ends with step 7.
        thorough({"steps": 9, "sequence": 96, "device-memory": "2MiB", "host-memory": "4MiB"}, 6),
    ],
)
def test_ctrl_c_ends_after_the_step_and_the_run_goes_on_to_the_same_bits(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: dict[str, Any],
    step: int,
) -> None:
    assert cli.main(arguments(place, "whole", **more)) == 0
    with monkeypatch.context() as patched:
        ends_at(patched, step, signals=1)
        assert cli.main(arguments(place, "cut", **more)) == 130
    said = capsys.readouterr().out
    assert "stopping in a moment" in said
    assert f"checkpoint of step {step + 1}" in said
    assert cli.main(["finetune", "--resume", f"--output={place / 'cut'}"]) == 0
    whole, cut = tensors(place / "whole" / "model"), tensors(place / "cut" / "model")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    steps = [r["step"] for r in lines(place / "cut") if "loss" in r]
    assert steps == list(range(1, more["steps"] + 1))


def test_a_run_that_ended_between_its_last_step_and_its_result_is_finished(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"steps": 2, "save-every": 1}
    assert cli.main(arguments(place, "whole", **more)) == 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(finetune, "finish", interrupt)
        assert cli.main(arguments(place, "cut", **more)) == 130
    assert not (place / "cut" / "model").exists()
    assert cli.main(["finetune", "--resume", f"--output={place / 'cut'}"]) == 0
    whole, cut = tensors(place / "whole" / "model"), tensors(place / "cut" / "model")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.thorough
def test_code_of_a_model_runs_only_when_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "tiny" / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    file = place / "tiny" / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"},
    }
    file.write_text(json.dumps(config))
    assert "--trust-remote-code runs it" in wrong(capsys, arguments(place, steps=1))
    done = subprocess.run(
        [sys.executable, "-m", "strata", *arguments(place, steps=1), "--trust-remote-code"],
        env=ENVIRONMENT | {"HF_HOME": str(place / "hub")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((place / "out" / "model" / "config.json").read_text())
    assert saved["architectures"] == ["MyModel"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lora": "r=8"}, "--lora trains adapters of a saved model"),
        ({"lora": "rank=8"}, "unknown setting 'rank'"),
        ({"lora": "alpha=8"}, "has no r="),
        ({"frozen": "nf4"}, "without --lora all is"),
        ({"lora": "r=8", "frozen": "nf5"}, "nf4"),
        ({"report-to": "tensorbord"}, "tensorbord is not supported"),
        ({"report-to": "clearml"}, "--report-to clearml: its package is not installed"),
    ],
)
def test_what_cannot_be_trained_or_told_is_refused_in_words(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    assert expected in wrong(capsys, arguments(place, **change))
    assert not (place / "out").exists()
