"""What is no model, or none that can be estimated, is refused in one line and nothing else."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from strata._cli import main as cli
from strata._cli.models import choose
from strata._config.options import Options
from transformers import BertConfig, LlamaConfig
from variants import thorough

BUDGET = "--memory=device=1GiB,host=1GiB"
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
}  # fmt: skip


def written(folder: Path, config: Any) -> str:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(file)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama", "hidden_size": 7}, "size (7) is not a multiple of the number of"),
        ({"model_type": "llama", "num_hidden_layers": "x"}, "'num_hidden_layers' expected int"),
        ({"model_type": "llama", "num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"model_type": "llama", "dtype": "zz"}, "has no attribute 'zz'"),
        ({"model_type": ["llama"]}, "unhashable"),
        ("no JSON", "not a valid JSON file"),
        ({"hidden_size": 64}, "model_type"),
        # What Transformers notices when it makes the model.
        (SMALL | {"hidden_act": "foo"}, "KeyError: 'foo'"),
        (SMALL | {"vocab_size": -5}, "vocab_size is -5, and has to be 1 at least"),
        (SMALL | {"pad_token_id": 1000}, "Padding_idx must be within"),
    ],
)
def test_a_bad_value_is_refused_with_the_file_and_the_reason(
    config: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, config)
    assert cli.main(["estimate", "--model", file, BUDGET]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("strata: ")
    assert file in said
    assert reason in said
    with pytest.raises(ValueError, match=r"config\.json") as refused:  # as finetune does
        choose(file, None, 64).build()
    assert "\n" not in str(refused.value)


def test_a_tokenizer_that_is_damaged_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        choose(file, None, 64).load_tokenizer()


@pytest.mark.parametrize(
    ("config", "batch", "reason"),
    [
        ({"model_type": "bert", "num_hidden_layers": 1}, "1", "The expanded size of the tensor"),
        thorough(SMALL, "1000000000000", "Storage size calculation overflowed"),
    ],
)
def test_a_model_that_cannot_run_on_shapes_is_refused_in_one_line(
    config: Any, batch: str, reason: str, tmp_path: Path
) -> None:
    file = written(tmp_path, config)
    told = [sys.executable, "-m", "strata", "estimate", "--model", file, BUDGET, "--batch", batch]
    ended = subprocess.run(told, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (said,) = ended.stderr.splitlines()
    assert said.startswith(f"strata: {config['model_type']} cannot run on shapes alone")
    assert reason in said


def test_what_libraries_log_is_heard_again_afterwards() -> None:
    from strata._cli import estimate

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    memory = {"device": 1 << 30, "host": 1 << 30, "ssd": 0}
    config = LlamaConfig(**{k: v for k, v in SMALL.items() if k != "model_type"})
    for batch in (1, 10**12):
        step = estimate.Step(config, batch, 2048, memory, "host", Options(dtype=torch.bfloat16))
        if batch > 1:
            with pytest.raises(ValueError, match="cannot run on shapes"):
                estimate.count(step)
        else:
            estimate.count(step)
        assert logger.level == before


def test_models_of_other_kinds_are_refused(tmp_path, capsys):
    BertConfig().save_pretrained(tmp_path)
    assert cli.main(["estimate", "--model", str(tmp_path / "config.json"), BUDGET]) == 1
    assert capsys.readouterr().err.startswith("strata: ")
