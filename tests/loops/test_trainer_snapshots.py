"""Trainer's checkpoints as snapshots: taken while training goes on, whole or never chosen, and
older ones stay until a newer one is complete."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage.checkpoint_files import write_manifest
from strata._storage.snapshots.capture import Taker
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.series import snapshots_of
from strata.integrations import _trainer_checkpoints as checkpoints
from strata.integrations.transformers import newest_checkpoint
from test_trainer import DATA, Mixed, arguments, losses
from toys import llama

SSD = {"device": "400KiB", "host": "8MiB", "ssd": "64MiB"}


def trainer(folder: Path, keywords: Any = None, **more: Any) -> Mixed:
    (folder / "drive").mkdir(parents=True, exist_ok=True)
    where = {"memory": SSD, "ssd_path": folder / "drive"}
    return Mixed(
        llama(),
        arguments(folder / "run", **{"save_total_limit": 1, "logging_steps": 1, **more}),
        train_dataset=DATA,
        eval_dataset=DATA[:8],
        strata={**where, **(keywords or {})},
    )


def links(folder: Path) -> list[str]:
    found = folder / "drive" / LINKS
    return sorted(e.name for e in found.glob("*.pages")) if found.is_dir() else []


def values(made: Mixed) -> list[torch.Tensor]:
    return [p.detach().clone() for p in made.model.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """A run of 8 steps that nothing cut."""
    made = trainer(tmp_path_factory.mktemp("whole"), save_strategy="no")
    made.train()
    return made


@pytest.mark.representative
def test_a_run_goes_on_from_its_snapshot_to_the_same_bits(tmp_path: Path, whole: Mixed) -> None:
    first = trainer(tmp_path, max_steps=8, save_total_limit=None)
    first.train()
    run = tmp_path / "run"
    assert losses(first) == losses(whole), "snapshots change nothing"
    assert len(links(tmp_path)) == 2
    checkpoints.remove_checkpoint(run / "checkpoint-8")
    assert len(links(tmp_path)) == 1
    assert not (run / "checkpoint-4" / "model.safetensors").exists()
    assert (run / "checkpoint-4" / "config.json").exists()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    assert all(map(torch.equal, values(again), values(whole)))
    assert newest_checkpoint(run) == run / "checkpoint-8"
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-8"]
    assert len(links(tmp_path)) == 1


def test_an_older_one_stays_until_a_newer_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation that counts what is under way would leave nothing to go on from."""
    brings, may_write = Taker._run, threading.Event()
    seen: list[tuple[list[str], Path | None]] = []
    run = tmp_path / "run"

    def slow(self: Any, future: Any, call: Any, asked: Any) -> None:
        if asked.folder.parent.parent.name == "checkpoint-6":
            assert may_write.wait(300)
        brings(self, future, call, asked)

    step = Mixed.training_step

    def watched(self: Any, *batch: Any) -> Any:
        loss = step(self, *batch)
        if self.state.global_step == 7:  # checkpoint-6 is on its way
            seen.append((sorted(p.name for p in run.iterdir()), newest_checkpoint(run)))
            may_write.set()
        return loss

    monkeypatch.setattr(Taker, "_run", slow)
    monkeypatch.setattr(Mixed, "training_step", watched)
    trainer(tmp_path, save_steps=3, eval_strategy="no").train()
    assert seen == [(["checkpoint-3", "checkpoint-6"], run / "checkpoint-3")]
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-8"], "and then it goes"
    assert len(links(tmp_path)) == 1


def train_slowly(folder: Path) -> None:
    """For a process that will be killed."""
    step = Mixed.training_step

    def slower(self: Any, *batch: Any) -> Any:
        time.sleep(0.1)
        return step(self, *batch)

    Mixed.training_step = slower  # type: ignore[method-assign]
    trainer(folder, save_steps=1).train()


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_a_killed_run_goes_on(tmp_path: Path, whole: Mixed, seconds: float) -> None:
    expected = losses(whole), values(whole)
    run = tmp_path / "run"
    code = (
        "import pathlib; from test_trainer_snapshots import train_slowly; "
        f"train_slowly(pathlib.Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while newest_checkpoint(run) is None:
        assert child.poll() is None, "it ended"
        time.sleep(0.01)
    time.sleep(seconds)
    child.kill()
    child.wait()
    again = trainer(tmp_path, save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == expected[0]
    assert all(map(torch.equal, values(again), expected[1]))
    assert newest_checkpoint(run) == run / "checkpoint-8"
    assert len(links(tmp_path)) == 1, "the killed process left links"


def test_the_best_one_is_kept_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([0.5, 0.1, 0.9, 0.8])  # the second is the best
    found: list[torch.Tensor] = []
    evaluate = Mixed.evaluate

    def scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = evaluate(self, *args, **kwargs)
        metrics["eval_loss"] = next(told)
        if metrics["eval_loss"] == 0.1:
            found.extend(values(self))
        return metrics

    monkeypatch.setattr(Mixed, "evaluate", scripted)
    made = trainer(tmp_path, save_steps=2, eval_steps=2, load_best_model_at_end=True)
    made.train()
    run = tmp_path / "run"
    assert made.state.best_model_checkpoint == str(run / "checkpoint-4")
    assert all(map(torch.equal, values(made), found))
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-4"], "as the Trainer does"
    assert len(links(tmp_path)) == 1


def test_without_room_the_first_step_is_refused(tmp_path: Path) -> None:
    little = {"memory": {**SSD, "ssd": "1MiB"}}
    with pytest.raises(strata.StrataError, match="would do") as refused:
        trainer(tmp_path, little, save_total_limit=3).train()
    assert "save_total_limit=3" in str(refused.value)
    enough = re.search(r'ssd="(\d+)MiB" would do', str(refused.value))
    assert enough is not None
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("checkpoint-*"))
    for ssd, fits in ((int(enough[1]), True), (int(enough[1]) - 1, False)):
        made = trainer(tmp_path, {"memory": {**SSD, "ssd": f"{ssd}MiB"}}, save_total_limit=3)
        made.args.save_steps = 1
        if fits:
            made.train()
            assert len(links(tmp_path)) == 3
        else:
            with pytest.raises(strata.StrataError, match="would do"):
                made.train()


def test_without_an_ssd_checkpoints_are_saved_and_it_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "strata")
    made = trainer(tmp_path, {"memory": {"device": "400KiB", "host": "16MiB"}, "ssd_path": None})
    made.train()
    folder = tmp_path / "run" / "checkpoint-8"
    assert "no ssd_path: checkpoints are saved by strata.save" in caplog.text
    assert snapshots_of(folder / "strata") == []
    assert (folder / "strata" / "manifest.json").exists()
    assert (folder / "model.safetensors").exists()


def test_an_interrupted_training_waits_for_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brings = Taker._run

    def slow(self: Any, *rest: Any) -> None:
        time.sleep(0.5)
        brings(self, *rest)

    step = Mixed.training_step

    def interrupted(self: Any, *batch: Any) -> Any:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(Taker, "_run", slow)
    monkeypatch.setattr(Mixed, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).train()
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-4"


def test_epochs_and_parts_of_steps_are_counted(tmp_path: Path) -> None:
    for more, steps, at_once in (
        ({"save_steps": 4}, 8, 1),
        ({"save_steps": 3}, 8, 2),
        ({"save_steps": 0.25}, 8, 3),
        ({"save_strategy": "epoch", "num_train_epochs": 4}, 64, 3),
        (
            {
                "save_strategy": "best",
                "eval_strategy": "epoch",
                "num_train_epochs": 4,
                "metric_for_best_model": "loss",
            },
            64,
            3,
        ),
        (
            {
                "save_strategy": "best",
                "eval_strategy": "steps",
                "eval_steps": 16,
                "metric_for_best_model": "loss",
            },
            64,
            3,
        ),
        ({"save_total_limit": 2}, 8, 2),
        ({"save_total_limit": 1, "load_best_model_at_end": True}, 8, 2),
    ):
        given = arguments(tmp_path, **{"save_total_limit": None, **more})
        assert checkpoints.snapshots_at_once(given, steps) == at_once, more


def test_the_newest_counts_and_halves_go(tmp_path: Path) -> None:
    """Also where a run went back to an older one, and counts on from there; what a killed process
    left of one goes when a newer one is complete, and nothing that is not ours."""

    def write(step: int, when: int, *, whole: bool = True, ours: bool = True) -> Path:
        folder = tmp_path / f"checkpoint-{step}"
        (folder / checkpoints.STATE_FOLDER if ours else folder).mkdir(parents=True)
        if whole:
            strata_folder = folder / checkpoints.STATE_FOLDER
            write_manifest(strata_folder, {"bytes": 0})
            (folder / checkpoints.TRAINER_STATE).write_text(json.dumps({"global_step": step}))
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (when, when))
        return folder

    write(300, 100), write(200, 110)
    newest = write(250, 120)
    cut = write(240, 105, whole=False)
    write(260, 130, whole=False)  # under way
    write(10, 90, whole=False, ours=False)
    assert newest_checkpoint(tmp_path) == newest
    assert set(checkpoints.outdated(tmp_path, limit=2, best=None)) == {
        tmp_path / "checkpoint-300",
        cut,
    }


def test_relative_paths_are_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(Path(), save_steps=2).train()
    assert sorted(p.name for p in Path("run").iterdir()) == ["checkpoint-8"]
    assert len(list((tmp_path / "drive" / LINKS).iterdir())) == 2, "links are left over"
    again = trainer(Path(), save_steps=2, max_steps=12)
    again.train(resume_from_checkpoint=True)
    assert len(list((tmp_path / "drive" / LINKS).iterdir())) == 2


def test_the_one_just_written_stays_when_the_clock_is_set_back(tmp_path: Path) -> None:
    trainer(tmp_path, save_steps=4, max_steps=4).train()
    run = tmp_path / "run"
    later = time.time() + 3600
    os.utime(run / "checkpoint-4" / checkpoints.TRAINER_STATE, (later, later))
    trainer(tmp_path).train(resume_from_checkpoint=True)
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-8"]
    assert len(links(tmp_path)) == 1
