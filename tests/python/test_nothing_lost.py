"""What happens to a run with snapshots, beside being killed (tests/campaigns): its disk fills or
turns read-only, its process is stopped, paths are links. STRATA_STOP_SECONDS=180 is for campaigns.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
from random_training import SERIES, Setting, Training
from strata._storage.checkpoint_files import CheckpointError
from strata._storage.replacing import WorkFolder
from strata._storage.snapshots.format import LINKS, REMOVED_NAME
from strata._storage.snapshots.series import remove_snapshot, snapshots_of


class Faults:
    """The nth file operation of a snapshot's thread fails, and with `lasting` all behind it."""

    def __init__(self) -> None:
        self.nth = self.count = 0
        self.lasting = False
        self.error = errno.ENOSPC
        sys.addaudithook(self._see)

    def begin(self, nth: int, error: int, lasting: bool) -> None:
        self.nth, self.count, self.error, self.lasting = nth, 0, error, lasting

    def end(self) -> None:
        self.nth = 0

    def _see(self, event: str, arguments: Any) -> None:
        if not self.nth or not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        if not threading.current_thread().name.startswith("strata-snapshot"):
            return
        changes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if not changes or event in ("os.listdir", "os.scandir"):
            return
        self.count += 1
        if self.count == self.nth or (self.lasting and self.count > self.nth):
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    (tmp_path / "drive0").mkdir()
    made = Training(Setting(place="ssd"), tmp_path)
    yield made
    strata.unwrap(made.model)


def snapshot(training: Training, series: Path) -> Path:
    extra = {"step": training.steps}
    return strata.snapshot(training.model, series, keep=1, extra=extra).wait()


def test_a_disk_that_fills_or_turns_read_only_takes_no_older_snapshot(
    training: Training, tmp_path: Path
) -> None:
    faults = Faults()
    series = tmp_path / SERIES
    for lasting, error in ((False, errno.ENOSPC), (True, errno.ENOSPC), (True, errno.EROFS)):
        nth = 0
        while nth == 0 or faults.count >= nth:
            nth += 1 if lasting or nth < 6 else 3
            training.step()
            snapshot(training, series)
            before, there = training.steps, training.digest()
            training.step()
            now = training.digest()
            faults.begin(nth, error, lasting)
            try:
                snapshot(training, series)
            except (OSError, CheckpointError, strata.StrataError):
                assert faults.count >= nth
            count = faults.count
            faults.end()
            assert training.digest() == now
            assert training.load(series)
            assert training.steps in (before, before + 1), "the newest one is lost"
            assert training.digest() == (there if training.steps == before else now)
            faults.count = count
    snapshot(training, series)
    assert len(snapshots_of(series)) == 1
    assert len(list((tmp_path / "drive0" / LINKS).glob("*.pages"))) == 1


def test_what_killed_processes_left_in_a_series_is_removed(
    training: Training, tmp_path: Path
) -> None:
    series = tmp_path / SERIES
    left = snapshot(training, series)
    os.replace(left / "manifest.json", left / REMOVED_NAME)  # killed while it was removed
    (left / "notes.txt").write_text("the user's")
    assert snapshots_of(series) == []
    training.step()
    snapshot(training, series)
    assert [e.name for e in left.iterdir()] == ["notes.txt"]
    assert len(list((tmp_path / "drive0" / LINKS).iterdir())) == 2


def test_a_snapshot_that_was_about_to_be_replaced_is_found(
    training: Training, tmp_path: Path
) -> None:
    series = tmp_path / SERIES
    training.step()
    folder = snapshot(training, series)
    digest = training.digest()
    with WorkFolder(series, folder.name) as work:  # killed between the two renames
        os.rename(folder, work.path / "old")
    training.step()
    assert training.load(series)
    assert training.digest() == digest
    snapshot(training, series)
    assert [e.name for e in series.iterdir()] == [folder.name]
    assert training.load(series)


def test_a_process_that_is_stopped_goes_on(tmp_path: Path) -> None:
    seconds = float(os.environ.get("STRATA_STOP_SECONDS", "1.5"))
    begun, begins = os.pipe()
    (tmp_path / "drive0").mkdir()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            training = Training(Setting(place="ssd"), tmp_path)
            handles = []
            end = 0.0
            while not end or time.monotonic() < end:
                training.step()
                extra = {"step": training.steps}
                handles.append(strata.snapshot(training.model, tmp_path / SERIES, extra=extra))
                if training.steps == 3:
                    end = time.monotonic() + seconds + 1  # the clock goes on while it is stopped
                    os.write(begins, b"!")
            assert handles[-1].wait().is_dir()
            (tmp_path / "digest").write_bytes(training.digest())
            strata.unwrap(training.model)
            status = 0
        finally:
            os._exit(status)
    os.close(begins)
    assert os.read(begun, 1) == b"!", "it ended before it was stopped"
    for _ in range(3):
        os.kill(child, signal.SIGSTOP)
        time.sleep(seconds / 3)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.05)
    assert os.waitpid(child, 0)[1] == 0
    again = Training(Setting(place="host"), tmp_path)
    assert again.load(tmp_path / SERIES)
    assert again.digest() == (tmp_path / "digest").read_bytes()
    strata.unwrap(again.model)


def test_links_to_drives_and_series_work_and_what_is_the_users_stays(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "drive").mkdir(parents=True)
    (real / "series").mkdir()
    for name in ("drive0", SERIES):
        (tmp_path / name).symlink_to(real / {"drive0": "drive", SERIES: "series"}[name])
    theirs = [real / "drive" / "strata-0000.pages", real / "series" / "step-000001.notes"]
    training = Training(Setting(place="ssd"), tmp_path)
    for step in range(3):
        training.step()
        folder = snapshot(training, tmp_path / SERIES)
        if step == 0:
            theirs += [real / "drive" / LINKS / "letter", folder / "notes.txt"]
            for path in theirs:
                path.write_text("the user's")
    assert all(path.read_text() == "the user's" for path in theirs)
    assert training.load(tmp_path / SERIES)
    remove_snapshot(*snapshots_of(tmp_path / SERIES))
    assert snapshots_of(tmp_path / SERIES) == []
    assert all(path.read_text() == "the user's" for path in theirs)
    assert sorted(e.name for e in (real / "drive" / LINKS).iterdir()) == ["letter"]
    assert (tmp_path / SERIES).is_symlink()
    assert (tmp_path / "drive0").is_symlink()
    strata.unwrap(training.model)
    assert all(path.read_text() == "the user's" for path in theirs)
