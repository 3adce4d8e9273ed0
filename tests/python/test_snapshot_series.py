"""Which snapshots a series keeps, and whose slots a run holds: also where somebody moves a folder,
sets the clock back, damages a manifest, or leaves the model to the garbage collector."""

import errno
import gc
import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
import strata
import torch
from strata._storage.checkpoint_files import (
    MANIFEST_NAME,
    OLD_NAME,
    CheckpointError,
    read_manifest,
    write_manifest,
)
from strata._storage.replacing import MARKER_NAME, WorkFolder
from strata._storage.snapshots import commit
from strata._storage.snapshots.format import FORMAT, LINKS, id_at
from strata._storage.snapshots.links import mark_pending
from strata._storage.snapshots.series import snapshots_of
from test_adopt import verify
from test_checkpoint import Case, llama
from test_saving import expected, same
from test_snapshot import HOST, SSD, disk, drive, links

__all__ = ["disk"]  # a fixture


def take(case: Case, series: Path, keep: int = 1) -> Path:
    case.train(1)
    return strata.snapshot(case.model, series, keep=keep).wait()


def test_one_that_is_moved_keeps_its_slots(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    first = take(case, tmp_path / "run", keep=2)
    masters = case.masters()
    first.rename(tmp_path / "best")
    for _ in range(5):
        take(case, tmp_path / "run", keep=2)
        verify(tmp_path / "best")
    strata.load(case.model, tmp_path / "best")
    assert all(a.equal(b) for a, b in zip(case.masters(), masters, strict=True))
    strata.snapshot(case.model, tmp_path / "run", keep=2).wait()  # in the folder that it had
    assert (tmp_path / "run" / first.name).is_dir()
    for _ in range(3):
        take(case, tmp_path / "run", keep=2)
        verify(tmp_path / "best")
    case.close()


@pytest.mark.parametrize("reboots", [False, True])
def test_one_that_was_put_aside_when_all_ended_comes_back(
    reboots: bool, tmp_path: Path, disk: Path
) -> None:
    """Another one of its step was to take its place, and the process was killed, or the machine
    lost power, between two renames."""
    case = Case(disk, SSD, llama())
    only = take(case, tmp_path / "run")
    masters = case.masters()
    case.close()
    mark_pending([str(disk)], str(id_at(only)), only)
    with WorkFolder(only.parent, only.name) as work:
        os.rename(only, work.path / OLD_NAME)
        if reboots:
            marker = json.loads((work.path / MARKER_NAME).read_text())
            (work.path / MARKER_NAME).write_text(json.dumps(marker | {"boot": "another"}))
    fresh = Case(disk, SSD, llama())
    strata.load(fresh.model, tmp_path / "run")
    assert all(a.equal(b) for a, b in zip(fresh.masters(), masters, strict=True))
    assert sorted(tmp_path.joinpath("run").iterdir()) == [only]
    fresh.close()


def test_one_that_nobody_waits_for_fails_with_a_word(
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commit, "write_manifest", full)
    strata.snapshot(case.model, tmp_path / "run")
    case.close()
    assert "has failed: [Errno 28] No space left on device" in caplog.text


def test_a_snapshot_of_another_version_is_refused(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    folder = take(case, tmp_path / "run")
    before = case.masters()
    manifest = read_manifest(folder)
    for version in (FORMAT - 1, FORMAT + 1):
        write_manifest(folder, manifest | {"snapshot": version})
        with pytest.raises(CheckpointError, match=f"version {version}; this strata reads"):
            strata.load(case.model, tmp_path / "run")
    assert all(map(torch.equal, case.masters(), before))
    case.close()


def test_steps_and_ranks_of_chunks_are_checked(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    folder = take(case, tmp_path / "run")
    manifest = read_manifest(folder)
    before = case.masters()
    for damage in (
        lambda m: m["chunks"][0]["runs"][0].__setitem__(4, -1),
        lambda m: m["chunks"][0]["runs"][0].__setitem__(4, 1.0),
        lambda m: m["chunks"][0]["runs"][0].append(0),
        lambda m: m["chunks"][0].update(rank=1),  # of one that was alone
    ):
        broken = json.loads(json.dumps(manifest))
        damage(broken)
        write_manifest(folder, broken)
        with pytest.raises(CheckpointError):
            strata.load(case.model, tmp_path / "run")
        assert all(map(torch.equal, case.masters(), before))
    case.close()


def test_the_newest_stays_when_the_clock_is_set_back(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    first = take(case, tmp_path / "run")
    later = time.time() + 3600
    os.utime(first / MANIFEST_NAME, (later, later))  # it was an hour ahead then
    for _ in range(3):
        newest = take(case, tmp_path / "run")
        assert snapshots_of(tmp_path / "run") == [newest]
    os.utime(newest / MANIFEST_NAME, (later, later))
    strata.load(case.model, tmp_path / "run")
    second = take(case, tmp_path / "run", keep=2)
    assert snapshots_of(tmp_path / "run") == [newest, second]
    case.close()


def test_a_load_that_is_interrupted_leaves_their_slots_alone(tmp_path: Path, disk: Path) -> None:
    """The session has taken the page files over, and nobody has learned the numbers."""
    case = Case(disk, SSD, llama())
    take(case, tmp_path / "run")
    case.close()
    again = Case(disk, SSD, llama())
    session = again.state.session

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def resume(self, *rest: Any) -> None:
            session.resume(*rest)
            raise KeyboardInterrupt

    again.state.session = cast(Any, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        strata.load(again.model, tmp_path / "run")
    again.state.session = session
    again.state.half_loaded = False  # as behind a load of something else
    for _ in range(2):
        with pytest.raises(strata.StrataError, match="wrap the model anew"):
            strata.snapshot(again.model, tmp_path / "run")
    verify(snapshots_of(tmp_path / "run")[0])
    again.close()


@pytest.mark.parametrize("ours", [True, False])
def test_what_is_damaged_or_not_ours_stops_no_other(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture, ours: bool
) -> None:
    case = Case(disk, SSD, llama())
    bad = tmp_path / "run" / "step-000000"
    if ours:
        bad = take(case, tmp_path / "run")
    else:
        bad.mkdir(parents=True)
    (bad / MANIFEST_NAME).write_text("{}")
    room = []
    for _ in range(4):
        newest = take(case, tmp_path / "run")
        room.append(case.state.session.stats()["ssd_bytes"])
        assert snapshots_of(tmp_path / "run") == [bad, newest]
    assert len(set(room)) == 1
    assert caplog.text.count("stays in the series") == 1
    strata.load(case.model, tmp_path / "run")
    case.close()


@pytest.mark.parametrize("memory", [SSD, HOST], ids=["ssd", "host"])
def test_the_end_of_a_function_completes_what_it_began(
    tmp_path: Path, memory: dict[str, str]
) -> None:
    held: dict[str, Any] = {}

    def run(work: Any, name: str) -> None:
        case = Case(drive(tmp_path, f"{name}-drive"), memory, llama())
        case.train(1)
        held[name] = expected(case)
        work(case)

    run(lambda case: strata.snapshot(case.model, tmp_path / "run"), "run")
    gc.collect()
    again = Case(drive(tmp_path, "other"), memory, llama())
    strata.load(again.model, tmp_path / "run")
    assert same(expected(again), held["run"])
    again.close()


def test_a_load_waits_for_what_is_under_way(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, HOST, llama())
    for number in range(8):
        case.train(1)
        strata.snapshot(case.model, tmp_path / "run", keep=1, extra={"number": number})
        assert strata.load(case.model, tmp_path / "run") == {"number": number}
    case.close()


def test_a_series_and_a_checkpoint_have_paths_of_their_own(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    strata.save(case.model, tmp_path / "c")
    with pytest.raises(CheckpointError, match="give another path"):
        strata.snapshot(case.model, tmp_path / "c")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        strata.snapshot(case.model, tmp_path / "file")
    folder = take(case, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is a snapshot"):
        strata.save(case.model, folder)
    verify(folder)
    case.close()


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "2", 1 << 32, None])
def test_keep_is_a_whole_number(tmp_path: Path, disk: Path, keep: Any) -> None:
    case = Case(disk, SSD, llama())
    with pytest.raises((TypeError, ValueError), match="keep must be"):
        strata.snapshot(case.model, tmp_path / "run", keep=keep)
    assert links(disk) == []
    assert not (disk / LINKS).exists()
    case.close()
