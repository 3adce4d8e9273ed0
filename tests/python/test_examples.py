"""The examples that need nothing but PyTorch and Transformers, in a small setting."""

import subprocess
import sys
from pathlib import Path

import pytest
from variants import thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {
    "plain_loop.py": ["--steps", "8"],
    "vision.py": ["--steps", "12"],
    "billion.py": ["--small", "--steps", "2", "--ssd", "{}"],
}


@pytest.mark.parametrize("name", [thorough(of) if of != "billion.py" else of for of in RUNS])
def test_examples_run(tmp_path: Path, name: str) -> None:
    arguments = [argument.format(tmp_path) for argument in RUNS[name]]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "loss" in run.stdout
    assert len((EXAMPLES / name).read_text().splitlines()) <= 70  # a page


def test_every_example_is_run_by_a_test() -> None:
    in_loops = {"trainer.py", "sft_lora.py"}  # tests/loops/test_examples.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUNS.keys() | in_loops
