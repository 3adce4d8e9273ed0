"""The examples for Trainer and TRL, in a small setting."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toys import folder_of_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((EXAMPLES / name).read_text().splitlines()) <= 70  # a page
    return done.stdout


def test_trainer_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    told = run(tmp_path, "trainer.py", "--steps", "12")
    assert "strata_percent_of_bound" in told
    out = tmp_path / "runs" / "trainer"
    state = json.loads((out / "checkpoint-12" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [5, 10]
    assert (out / "model.safetensors").exists()


@pytest.mark.representative
def test_sft_with_lora(tmp_path: Path) -> None:
    model = folder_of_model(tmp_path / "model")
    chat = [
        {"role": "user", "content": "what does the fox do"},
        {"role": "assistant", "content": "it jumps over the lazy dog."},
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join([json.dumps({"messages": chat})] * 16))
    run(
        tmp_path, "sft_lora.py", "--model", str(model), "--data", str(data), "--steps", "3",
        "--device", "64MiB", "--host", "64MiB", "--out", "out",
    )  # fmt: skip
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 100_000
