"""What the README shows, runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_is_something_to_run():
    assert BLOCKS


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "strata.report" in BLOCKS[number]:
        (reached,) = re.findall(r"(\d+) % of it reached", done.stdout)
        assert 0 < int(reached) <= 100, done.stdout
        assert "limited by " in done.stdout


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_commands_it_names_are_commands():
    text = (ROOT / "dev").read_text()
    named = set(re.findall(r"\./dev ([a-z]+)", README))
    assert {"demo", "test"} <= named
    assert [name for name in sorted(named) if not re.search(rf"^  {name}[ )|]", text, re.M)] == []
