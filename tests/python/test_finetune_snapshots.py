"""strata finetune --snapshot-every: a run that was killed goes on to the same bits, Ctrl-C waits
for the snapshot, and replacing a run frees what its snapshots kept on the drive."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import ENVIRONMENT, arguments, lines, tensors, wrong
from strata._cli import main as cli
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.series import snapshots_of
from strata.integrations.transformers import newest_checkpoint

ROOM: dict[str, Any] = {"ssd-memory": "64MiB", "eval-every": 0}


def links(place: Path) -> list[Path]:
    folder = place / "disk" / LINKS
    return sorted(folder.glob("*.pages")) if folder.is_dir() else []


def started(told: list[str], script: str = "") -> subprocess.Popen[str]:
    code = f"import sys, time; from strata._cli import main as cli\n{script}\n"
    command = [sys.executable, "-u", "-c", code + "sys.exit(cli.main(sys.argv[1:]))", *told]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def wait_for_checkpoint(output: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while newest_checkpoint(output) is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "no checkpoint was made"
        time.sleep(0.01)


SLOW = (
    "from strata._cli.finetune.trainer import Finetuner\n"
    "step = Finetuner.training_step\n"
    "Finetuner.training_step = lambda *given: (time.sleep(0.1), step(*given))[1]\n"
)


@pytest.mark.representative
def test_a_killed_run_goes_on_to_the_same_bits(place: Path) -> None:
    assert cli.main(arguments(place, "whole", steps=8, **ROOM)) == 0
    told = arguments(place, "cut", steps=8, **ROOM, **{"snapshot-every": 1})
    process = started(told, SLOW)
    wait_for_checkpoint(place / "cut", process)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cli.main(["finetune", "--resume", f"--output={place / 'cut'}"]) == 0
    whole, cut = (tensors(place / name / "model") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    losses = [
        {r["step"]: r["loss"] for r in lines(place / f) if "loss" in r} for f in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    assert len(links(place)) == 1, "one snapshot stays, and the killed process left no links"
    # Replacing the run frees the drive.
    assert cli.main([*arguments(place, "cut", steps=1, **ROOM), "--overwrite"]) == 0
    assert links(place) == []


@pytest.mark.thorough
def test_ctrl_c_waits_for_the_snapshot(place: Path) -> None:
    slow_disk = (
        "from strata._storage.snapshots.commit import Commit\n"
        "run = Commit.run\n"
        "Commit.run = lambda *given: (time.sleep(1), run(*given))[1]\n"
    )
    told = arguments(place, steps=100_000, **ROOM, **{"snapshot-every": 3})
    process = started(told, slow_disk)
    wait_for_checkpoint(place / "out", process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "is being taken in" in said
    last = max(r["step"] for r in lines(place / "out"))
    newest = newest_checkpoint(place / "out")
    assert newest is not None
    assert newest.name == f"checkpoint-{last}", "of the last step, and complete"
    assert len(snapshots_of(newest / "strata")) == len(links(place)) == 1
    more = ["finetune", "--resume", f"--output={place / 'out'}", f"--steps={last + 1}"]
    assert cli.main(more) == 0


def test_what_excludes_each_other_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = arguments(place, **{"snapshot-every": 2, "save-every": 2})
    assert "exclude each other" in wrong(capsys, both)
    nowhere = arguments(place, **{"snapshot-every": 2, "ssd-path": None, "ssd-memory": None})
    assert "--snapshot-every needs --ssd-path" in wrong(capsys, nowhere)
    little = arguments(place, **{"snapshot-every": 2, "ssd-memory": "2MiB"})
    said = wrong(capsys, little)
    assert "snapshots need" in said
    assert "would do" in said
    assert not (place / "out" / "data").exists()
