"""An exception of a signal handler at any point of a save, a snapshot or a load: KeyboardInterrupt,
or a timeout's. Training goes on to the same bits, or is refused until a load has come to its end;
what is on the disk is whole or absent; no slot stays held for nobody.

As in test_interrupts.py, STRATA_INTERRUPTS=all tries every point and STRATA_INTERRUPTS=100 every
hundredth.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from interrupts import Expired, Interrupt
from random_training import Setting, Training
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import find
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.series import snapshots_of
from test_interrupts import chosen

KINDS = (KeyboardInterrupt, Expired)
STEPS = 2  # behind which it is saved


class Run(Training):
    """A training with what it should be behind each of some steps."""

    def __init__(self, folder: Path) -> None:
        (folder / "drive0").mkdir()
        super().__init__(Setting(place="ssd"), folder)
        self.drive, self.series, self.base = folder / "drive0", folder / "run", folder / "base"
        self.expected = [self.digest()]
        for _ in range(STEPS):
            self.step()
            self.expected.append(self.digest())
        strata.snapshot(self.model, self.base, extra={"step": STEPS}).wait()
        for _ in range(3):
            self.step()
            self.expected.append(self.digest())
        self.back()
        strata.snapshot(self.model, self.series, keep=1, extra={"step": STEPS}).wait()
        self.room = self.kept()

    def back(self) -> None:
        """To where the base is."""
        assert self.load(self.base)
        self.check()

    def check(self) -> None:
        assert self.digest() == self.expected[self.steps], f"the state behind step {self.steps}"

    def goes_on(self) -> None:
        self.check()
        self.step()
        self.check()

    def kept(self) -> int:
        """Slots that snapshots hold, and pages do not rest in."""
        stats: dict[str, Any] = wrapped(self.model).session.stats()
        return int(stats["slots_kept"])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.load(made.base)
    strata.unwrap(made.model)


def interrupted(work: Any, points: int) -> Iterator[Interrupt]:
    """One for each chosen point and kind; `work` is to be run in it."""
    for i, at in enumerate(chosen(points)):
        kinds = KINDS if os.environ.get("STRATA_INTERRUPTS") == "all" else (KINDS[i % 2],)
        for kind in kinds:
            interrupt = Interrupt(at, kind)
            try:
                interrupt.run(work)
                yield interrupt
            except BaseException as error:
                error.add_note(f"{kind.__name__} at point {at} of {points}: {interrupt.where}")
                raise


def points_of(work: Any) -> int:
    counted = Interrupt(None)
    counted.run(work)
    return counted.count


def test_a_snapshot_that_is_interrupted_anywhere(run: Run) -> None:
    def work() -> None:
        strata.snapshot(run.model, run.series, keep=1, extra={"step": run.steps}).wait()

    points = points_of(work)
    points = points_of(work)
    for _ in interrupted(work, points):
        run.goes_on()
        try:
            strata.snapshot(run.model, run.series, keep=1, extra={"step": run.steps}).wait()
        except strata.StrataError:  # what the interrupted one failed with: it is told once
            strata.snapshot(run.model, run.series, keep=1, extra={"step": run.steps}).wait()
        assert [folder.name for folder in snapshots_of(run.series)] == [f"step-{run.steps:06d}"]
        assert len(os.listdir(run.series)) == 1, "something is left over"
        assert len(os.listdir(run.drive / LINKS)) == 4, "links are left over"
        assert run.kept() <= 2 * run.room, "slots are held for nobody"
        assert run.load(run.series)
        run.check()
        run.back()


def test_a_save_that_is_interrupted_anywhere(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def work() -> None:
        strata.save(run.model, place, extra={"step": run.steps})

    points = points_of(work)
    for _ in interrupted(work, points):
        run.goes_on()
        if (found := find(place)) is not None:
            run.load(place)
            run.check()
            shutil.rmtree(found)
        run.back()
        strata.save(run.model, place, extra={"step": run.steps})
        beside = [e.name for e in tmp_path.iterdir() if e.name.startswith("checkpoint")]
        assert beside == ["checkpoint"], "something is left over"
        shutil.rmtree(place)


def test_a_load_that_is_interrupted_anywhere(run: Run, tmp_path: Path) -> None:
    strata.save(run.model, tmp_path / "checkpoint", extra={"step": STEPS})
    for place in (run.base, tmp_path / "checkpoint"):

        def work(place: Path = place) -> None:
            assert run.load(place)

        points = points_of(work)
        for interrupt in interrupted(work, points):
            before = run.steps
            if is_refused(run):
                with pytest.raises(RuntimeError, match="half-way"):
                    strata.save(run.model, tmp_path / "nowhere")
                with pytest.raises(RuntimeError, match="half-way"):
                    strata.snapshot(run.model, tmp_path / "nowhere")
            else:
                assert run.digest() in (run.expected[before], run.expected[STEPS]), interrupt.where
            work()
            run.goes_on()
            run.goes_on()
    assert not (tmp_path / "nowhere").exists()


def is_refused(run: Run) -> bool:
    try:
        with torch.no_grad():
            run.model(torch.zeros(1, 96))
    except RuntimeError as error:
        if "half-way" not in str(error):
            raise
        return True
    return False
