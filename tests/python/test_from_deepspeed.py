"""A DeepSpeed file becomes keywords, an optimizer and a schedule; nothing is dropped in silence."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strata
import torch
from small_models import VOCABULARY, llama
from strata.integrations import _deepspeed_file as reading
from strata.integrations._deepspeed_keys import KEYS, SECTIONS, Keyword, Refused
from strata.integrations.deepspeed import ACCUMULATION, HONOURED, NOT_NEEDED
from transformers import TrainingArguments

# What Transformers' documentation shows for ZeRO-3 with NVMe offload, in short.
ZERO3 = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "SSD", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "SSD", "max_in_cpu": 1e9},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def arguments(**more: Any) -> SimpleNamespace:
    """The fields of TrainingArguments that are read; constructing those needs accelerate."""
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 2e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_steps": -1,
        "bf16": True,
        "fp16": False,
    }
    return SimpleNamespace(get_warmup_steps=lambda steps: steps // 10, **{**fields, **more})


def verdicts(keywords: Any) -> dict[str, str]:
    return {row.key: row.verdict for row in keywords.rows}


def test_a_usual_file_trains_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ZERO3).replace("SSD", str(tmp_path)))
    keywords = strata.from_deepspeed(file, arguments())
    assert keywords == {
        ACCUMULATION: 2,
        "max_grad_norm": 0.5,
        "dtype": torch.bfloat16,
        "skip_nonfinite": True,
        "ssd_path": str(tmp_path),
    }
    found = verdicts(keywords)
    assert found["zero_optimization.reduce_bucket_size"] == NOT_NEEDED
    assert found["train_batch_size"] == NOT_NEEDED
    printed = capsys.readouterr().out
    assert re.search(r"^honoured$", printed, re.M)
    assert "DataLoader(batch_size=4)" in printed
    assert "aio.block_size, queue_depth: " in printed
    assert max(map(len, printed.splitlines())) <= 100

    model = llama()
    optimizer = keywords.optimizer(model.parameters())
    assert type(optimizer) is torch.optim.AdamW
    memory = {"device": "4MiB", "host": "16MiB", "ssd": "64MiB"}
    model, optimizer = strata.wrap(model, optimizer, memory=memory, **keywords)
    (group,) = optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0.1)
    scheduler = keywords.scheduler(optimizer, steps=40)
    rates, batch = [], torch.arange(32).reshape(2, 16) % VOCABULARY
    for _ in range(6):
        for _ in range(2):
            (model(input_ids=batch, labels=batch).loss / 2).backward()
        rates.append(group["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert rates[:2] == [0.0, 0.0]
    assert rates[2] == pytest.approx(1e-5)  # log 2 of log 4
    assert rates[5] == 2e-5
    assert strata.report(model).steps == 6
    strata.unwrap(model)


def test_the_file_is_left_as_it_was() -> None:
    config = {"gradient_clipping": 1.0, "zero_optimization": {"offload_param": {"device": "cpu"}}}
    before = json.dumps(config)
    strata.from_deepspeed(config)
    assert json.dumps(config) == before


def test_every_key_is_known_by_one_verdict() -> None:
    # The documentation has about 200 keys in all, half of them of parts that are told whole.
    assert len(KEYS) > 120
    names = set(inspect.signature(strata.wrap).parameters)
    for path, verdict in KEYS.items():
        assert isinstance(verdict, Keyword | Refused | str | None), path
        assert verdict != "", path
        assert not isinstance(verdict, Keyword) or verdict.name in names, path
        section = path.rpartition(".")[0]
        assert not section or section in SECTIONS, path


def test_what_is_read_of_arguments_is_there() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    read = reading.FROM_ARGUMENTS.values()
    assert {name for names in read for name in names} | {"max_steps"} <= fields
    assert "num_training_steps" in inspect.signature(TrainingArguments.get_warmup_steps).parameters


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimisation": {}}, "'zero_optimisation': did you mean 'zero_optimization'?"),
        ({"stage": 3}, "'stage': it belongs in 'zero_optimization'"),
        ({"zero_optimization": {"offload_params": {}}}, "did you mean 'offload_param'?"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "it belongs in no section"),
        ({"bf16": {"enable": True}}, "'bf16.enable': did you mean 'enabled'?"),
        ({"bfloat16": {"enable": True}}, "'bf16.enable'"),
        ({"aio": {"block_sizes": 1}}, "did you mean 'block_size'?"),
        ({"xyz": 1}, "'xyz': none is like it"),
        ({"zero_optimization": {"offload_param": {"device": "cuda"}}}, "unknown .*'cuda'"),
        ({"data_types": {"param_dtype": "bf61"}}, "did you mean 'bf16'?"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled is 'auto': pass args="),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            "optimizer.params.lr is 'auto'",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has params, and no type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "pass args="),
        ({"gradient_accumulation_steps": 1.5}, "must be a whole number from 1 on, not 1.5"),
        ({"gradient_clipping": -1}, "must be a number from 0 on, not -1"),
        ({"gradient_clipping": "1.0"}, "must be a number from 0 on, not '1.0'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
    ],
)
def test_what_makes_no_sense_is_an_error(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        strata.from_deepspeed(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "bf16"),
        ({"torch_autocast": {"enabled": True}}, "torch.autocast"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "LockFree"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "needs nvme_path"),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "frozen"),
        ({"optimizer": {"type": "OneBitAdam"}}, "AdamW"),
        ({"optimizer": {"type": "Muon"}}, "AdamW"),
        ({"optimizer": {"type": "AdanW"}}, "did you mean 'AdamW'?"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 1}}}, "did you mean 'betas'?"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "OneCycleLR"),
        ({"scheduler": {"type": "WarmupRL"}}, "did you mean 'WarmupLR'?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_num_steps"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "lin"}}}, "'linear'"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale = 128: write 0"),
        ({"tensor_parallel": {"autotp_size": 4}}, "one process"),
        ({"sequence_parallel_size": 2}, "one process"),
        ({"sparse_gradients": True}, "sparse=False"),
        ({"checkpoint": {"load_universal": True}}, "weights="),
        ({"data_efficiency": {"enabled": True, "seed": 1}}, "DataLoader"),
        ({"compile": {"deepcompile": True}}, "torch.compile"),
        ({"compression_training": {"pruning": {"shared": {"enabled": True}}}}, "change the model"),
        ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, "cannot be divided"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,
          "gradient_accumulation_steps": 2}, "steps 16 gives the same batch in one process"),
    ],
)  # fmt: skip
def test_what_strata_cannot_do_is_refused_with_what_to_use(
    config: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="strata cannot do all") as caught:
        strata.from_deepspeed(config)
    assert says in str(caught.value)
    assert "\nrefused\n" in capsys.readouterr().out  # behind the table, which shows everything


def test_batches_are_those_of_the_processes_that_were_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    assert strata.from_deepspeed(config)["gradient_accumulation_steps"] == 8
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert strata.from_deepspeed(config)["gradient_accumulation_steps"] == 4
    four = config | {"gradient_accumulation_steps": 4}
    assert strata.from_deepspeed(four)["gradient_accumulation_steps"] == 4
    with pytest.raises(ValueError, match="_steps 4 gives the same batch in 2 processes"):
        strata.from_deepspeed(config | {"gradient_accumulation_steps": 8})
    with pytest.raises(ValueError, match="cannot be divided by 2 processes"):
        strata.from_deepspeed({"train_batch_size": 9})


def test_all_that_is_refused_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"amp = .*\n.*nebula = "):
        strata.from_deepspeed({"amp": {"enabled": True}, "nebula": {"enabled": True}})


@pytest.mark.parametrize(
    "config",
    [
        {"amp": {"enabled": False}, "elasticity": {"max_gpus": 4}, "compile": {"debug_log": True}},
        {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 0}, "pipeline": {}},
        {"checkpoint": {"load_universal": False}, "sparse_gradients": False},
        {"zero_optimization": {"offload_param": None, "zenflow": None, "stage": 0}},
        {"zero_optimization": True},
        {"compression_training": {"pruning": {"shared": {"enabled": False}, "groups": {"a": 1}}}},
        {"bf16": None, "scheduler": {}, "data_types": {"param_dtype": None}},
        {"fp16": {"enabled": False, "loss_scale": 128, "auto_cast": True}},
    ],
)
def test_what_is_off_is_not_refused(config: dict[str, Any]) -> None:
    keywords = strata.from_deepspeed(config)
    assert keywords == {"max_grad_norm": 1.0}  # DeepSpeed's default
    assert HONOURED not in {v for k, v in verdicts(keywords).items() if k != "gradient_clipping"}
    assert all(row.says for row in keywords.rows)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ((None, None, None), None),
        ((8, None, None), None),
        ((8, 8, 1), None),
        ((8, 4, 2), 2),
        ((8, 2, None), 4),
        ((8, None, 2), 2),
        ((None, 2, 3), 3),
        ((None, None, 3.0), 3),
    ],
)
def test_of_two_batch_sizes_the_third_follows(sizes: tuple[Any, ...], calls: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    assert strata.from_deepspeed(given).get(ACCUMULATION) == calls


def test_a_value_against_the_arguments_is_an_error() -> None:
    for config, says in (
        ({"gradient_clipping": 1.0}, "is 1.0, and max_grad_norm of args says 0.5"),
        ({"bf16": {"enabled": False}}, "bf16 of args says True"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.999]}}}, "adam_beta1 and"),
    ):
        with pytest.raises(ValueError, match=says):
            strata.from_deepspeed(config, arguments())
    same = {"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.95), "lr": 2e-5}}}
    strata.from_deepspeed(same, arguments())


def test_float16_comes_with_a_scaler() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50}}
    keywords = strata.from_deepspeed(config)
    assert keywords == {"max_grad_norm": 1.0, "dtype": torch.float16}
    scaler = keywords.scaler()
    assert isinstance(scaler, strata.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (1024.0, 50)
    assert not strata.from_deepspeed({"bf16": {"enabled": True}}).scaler().is_enabled()


def test_short_state_and_several_drives() -> None:
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/a"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/b"},
    }
    bf16 = {"enabled": True, "bf16_optimizer_states": True, "check_grad_overflow": False}
    keywords = strata.from_deepspeed({"zero_optimization": zero, "bf16": bf16})
    assert keywords["ssd_path"] == ["/mnt/a", "/mnt/b"]
    assert keywords["state_dtype"] is torch.bfloat16
    assert "skip_nonfinite" not in keywords
    cpu = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/mnt/a"}}}
    assert "ssd_path" not in strata.from_deepspeed(cpu)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("{", ValueError, "is no JSON"),
        ("[]", TypeError, "holds a list"),
        ('{"aio": {"queue_depth": 1, "queue_depth": 2}}', ValueError, "more than once"),
        ('{"aio": 3}', TypeError, "aio must be a dictionary, not 3"),
        ('{"optimizer": {"type": "Adam", "params": 3}}', TypeError, "params must be a dictionary"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, text: str, kind: type, says: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(kind, match=says):
        strata.from_deepspeed(file)
    with pytest.raises(FileNotFoundError):
        strata.from_deepspeed(tmp_path / "nowhere.json")
    with pytest.raises(TypeError, match="a path or a dictionary"):
        strata.from_deepspeed(3)  # type: ignore[arg-type]


def test_without_sections_there_is_nothing_to_make() -> None:
    keywords = strata.from_deepspeed({})
    with pytest.raises(ValueError, match='no "optimizer"'):
        keywords.optimizer([])
    with pytest.raises(ValueError, match='no "scheduler"'):
        keywords.scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
