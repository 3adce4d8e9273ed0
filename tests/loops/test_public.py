"""Loops and test cases that others have published, with strata under them.

Accelerate's own tests come from its source archive and run as they are, in a process of their own
(over_prepare.py wraps what Accelerator.prepare is given); those of its package are called. TRL's
programs are called with its trainers over the mixin. Each says how many models were wrapped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import over_prepare
import pytest
import strata
import torch
import trl
from accelerate.test_utils.scripts import test_script, test_sync
from peft import LoraConfig, get_peft_model
from toys import LETTERS, MEMORY, folder_of_model, llama, over_strata, same, some

SOURCES = Path(os.environ["STRATA_LOOPS"])  # unpacked source archives: ./dev sets it
# Compares the free memory of the whole machine, which others use meanwhile.
WHOLE_MACHINE = "test_free_memory_dereferences_prepared_components"
CASES = {
    "checkpoints of Accelerate": ("accelerate", "test_state_checkpointing.py", 15),
    "Accelerator": ("accelerate", "test_accelerator.py", 8),
}


@pytest.mark.parametrize("what", some(CASES, "Accelerator"))
def test_cases_of_a_source_archive(what: str) -> None:
    package, file, least = CASES[what]
    (folder,) = SOURCES.glob(f"{package}-*/tests")
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "over_prepare",
            *("-o", "addopts="),
            *("-k", f"not {WHOLE_MACHINE}"),
            file,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ["PYTHONPATH"]])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    wrapped = int(run.stdout.split("wrapped models: ")[1].split()[0])
    assert wrapped >= least


LOOPS: dict[str, Any] = {
    "accumulation": test_sync.test_gradient_accumulation_with_opt_and_scheduler,
    "accumulation, each batch synchronised": lambda: (
        test_sync.test_gradient_accumulation_with_opt_and_scheduler(sync_each_batch=True)
    ),
    "training in several precisions": test_script.training_check,
    "training with a seedable sampler": lambda: test_script.training_check(True),
}


@pytest.mark.parametrize("name", some(LOOPS, "accumulation"))
def test_scripts_of_accelerate(name: str) -> None:
    with over_prepare.installed() as count:
        LOOPS[name]()
        assert count() > 0


LORA = ["--use_peft", "--lora_r=4", "--lora_target_modules", "q_proj", "v_proj"]
PROGRAMS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "sft": ("SFTTrainer", [{"text": "the quick brown fox jumps over the lazy dog."}]),
    "dpo": (
        "DPOTrainer",
        [{"prompt": "the sky is ", "chosen": "blue and wide.", "rejected": "a kind of fish."}],
    ),
    "reward": ("RewardTrainer", [{"chosen": "blue and wide.", "rejected": "a kind of fish."}]),
    "kto": (
        "KTOTrainer",
        [
            {"prompt": "the sky is ", "completion": "blue and wide.", "label": True},
            {"prompt": "the sky is ", "completion": "a kind of fish.", "label": False},
        ],
    ),
}


def losses_of(
    monkeypatch: pytest.MonkeyPatch, name: str, trainer: Any, arguments: list[str]
) -> list[float]:
    """Of TRL's program of this name, with a class of trainers in the place of its own."""
    module: Any = __import__(f"trl.scripts.{name}", fromlist=["main"])
    made: list[Any] = []

    class Kept(trainer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(trl, PROGRAMS[name][0], Kept)
        common = [
            "--max_steps=4", "--logging_steps=1", "--per_device_train_batch_size=2",
            "--report_to=none", "--use_cpu", "--bf16=False", "--disable_tqdm=True",
            "--save_steps=2", "--max_length=64", "--dtype=float32",
        ]  # fmt: skip
        module.main(*module.make_parser().parse_args_and_config([*arguments, *common])[:4])
    return [row["loss"] for row in made[0].state.log_history if "loss" in row]


def folder_of_data(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A data set as `datasets` reads it."""
    assert all(c in LETTERS for row in rows for v in row.values() if isinstance(v, str) for c in v)
    path.mkdir()
    (path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 16))
    return path


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", some(PROGRAMS, "sft"))
def test_programs_of_trl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, lora: bool
) -> None:
    class_name, rows = PROGRAMS[name]
    model, data = folder_of_model(tmp_path / "model"), folder_of_data(tmp_path / "data", rows)
    losses = {}
    for over in (False, True):
        trainer = getattr(trl, class_name)
        arguments = [
            f"--model_name_or_path={model}", f"--dataset_name={data}",
            f"--output_dir={tmp_path / f'out-{over}'}",
            *(LORA if lora else []),
            *(["--lora_task_type=SEQ_CLS"] if name == "reward" else []),
        ]  # fmt: skip
        losses[over] = losses_of(
            monkeypatch, name, over_strata(trainer) if over else trainer, arguments
        )
        names = {p.name for p in (tmp_path / f"out-{over}").iterdir()}
        assert ("adapter_model.safetensors" if lora else "model.safetensors") in names
    assert same(losses[False], losses[True], 1e-4)


@pytest.mark.representative
def test_a_recipe_of_qlora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """frozen="nf4" in the place of load_in_4bit: the losses of the plain recipe over the values
    that the codes stand for."""
    base = folder_of_model(tmp_path / "base")
    stands_for = folder_of_model(tmp_path / "values", values_of_codes(llama()))
    data = folder_of_data(tmp_path / "data", PROGRAMS["sft"][1])
    losses = [
        losses_of(monkeypatch, "sft", trainer, [
            f"--model_name_or_path={model}", f"--dataset_name={data}",
            f"--output_dir={tmp_path / out}", "--learning_rate=1e-2", *LORA,
        ])
        for trainer, model, out in (
            (trl.SFTTrainer, stands_for, "plain"),
            (over_strata(trl.SFTTrainer, frozen="nf4"), base, "coded"),
            (trl.SFTTrainer, base, "other"),
        )
    ]  # fmt: skip
    assert same(losses[0], losses[1], 1e-4)
    assert not same(losses[0], losses[2], 1e-4)
    assert (tmp_path / "coded" / "adapter_model.safetensors").exists()


def values_of_codes(model: Any) -> Any:
    """The model with what its linear layers show once they rest in 4 bits."""
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    adapted, _ = strata.wrap(adapted, torch.optim.AdamW(trained), memory=MEMORY, frozen="nf4")
    return strata.unwrap(adapted).unload()
