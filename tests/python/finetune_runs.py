"""Runs of `strata finetune` on a tiny model, and what they leave."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from strata._cli import main as cli
from strata._storage.weights import WeightFiles

LINES = "the quick brown fox jumps over the lazy dog\nand the dog sleeps on in the sun\n"

# Else runs would find what those of other versions left in the user's.
CACHE = tempfile.TemporaryDirectory(prefix="strata-datasets-")
os.environ["HF_DATASETS_CACHE"] = CACHE.name

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # for child processes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with text and a tiny model's config, as the working directory of a user has them."""
    from transformers import LlamaConfig  # not for suites that need none of it

    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i}\n" + LINES * 12)
    LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        attention_dropout=0.1,
    ).save_pretrained(tmp_path / "tiny")  # fmt: skip
    (tmp_path / "disk").mkdir()
    return tmp_path


def arguments(place: Path, output: str = "out", **more: Any) -> list[str]:
    told = {
        "model": place / "tiny" / "config.json", "data": place / "text", "output": place / output,
        "device-memory": "512KiB", "host-memory": "1MiB", "ssd-memory": "16MiB",
        "ssd-path": place / "disk", "steps": 6, "sequence": 32, "batch": 2, "accumulation": 2,
        "eval-every": 3, "eval-windows": 4, "generate": 4, "lr": 0.003,
        "dtype": "bfloat16",  # whatever the processor
    } | more  # fmt: skip
    return ["finetune", *(f"--{name}={value}" for name, value in told.items() if value is not None)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(folder)
    return {name: files.read(name).clone() for name in files.names()}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wrong(capsys: pytest.CaptureFixture[str], told: list[str]) -> str:
    """What a call that is refused says."""
    try:
        status = cli.main(told)
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]
    assert status in (1, 2)
    return " ".join(capsys.readouterr().err.split())
