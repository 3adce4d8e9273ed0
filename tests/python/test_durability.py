"""The kernel tells once that a write to a page file was lost. From then on a run takes no snapshots
of these files, says which one is durable, and trains on."""

import errno
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import strata
import torch
from strata._storage import replacing
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.series import snapshots_of
from test_checkpoint import Case, llama
from test_snapshot import SSD, disk, links

__all__ = ["disk"]  # a fixture


class LostWrite:
    """A session whose drive loses a write: fdatasync fails once, when it may, and never again."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.told = False
        self.may_fail = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def make_pages_durable(self) -> None:
        if not self.told:
            self.told = self.may_fail.wait()
            error = strata.StrataError("pages cannot be made durable")
            error.fault, error.errno = "io", errno.EIO
            raise error
        self._session.make_pages_durable()


def lose_a_write(case: Case) -> threading.Event:
    """When the next snapshot does; it waits for the event."""
    session = LostWrite(case.state.session)
    case.state.snapshots._session = cast(Any, session)
    return session.may_fail


def fail_once(monkeypatch: pytest.MonkeyPatch, ends: str, has: str = "") -> list[str]:
    """The first fsync of a path that ends so, and has that. Returns those that failed."""
    failed: list[str] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not failed and path.endswith(ends) and has in path:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(replacing.os, "fsync", fsync)
    return failed


def slots_kept(case: Case) -> int:
    """Slots that only snapshots hold, once every page has moved on."""
    case.train(1)
    case.state.synchronize()
    return int(case.state.session.stats()["slots_kept"])


def refused(case: Case, series: Path, newest: Path) -> None:
    for _ in range(2):
        with pytest.raises(strata.StrataError, match="could not be made durable") as error:
            strata.snapshot(case.model, series)
        assert f"The newest snapshot that is durable is {newest}." in str(error.value)
        assert error.value.fault == "io"


def test_a_lost_write_ends_the_snapshots_of_a_run(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    first = strata.snapshot(case.model, tmp_path / "run").wait()
    masters = case.masters()
    after = case.train(1)
    lost = lose_a_write(case)
    second = strata.snapshot(case.model, tmp_path / "run")
    third = strata.snapshot(case.model, tmp_path / "run")  # begun before anybody knows
    lost.set()
    for handle in (second, third):
        with pytest.raises(strata.StrataError, match=f"(?s)Input/output error.*is {first}"):
            handle.wait()
    refused(case, tmp_path / "run", first)
    assert snapshots_of(tmp_path / "run") == [first]
    assert len(links(disk)) == 2

    after += case.train(1)  # goes on being right
    held = case.masters()
    strata.save(case.model, tmp_path / "c")
    after += case.train(1)
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert all(map(torch.equal, again.masters(), masters))
    assert again.train(3) == after
    strata.load(again.model, tmp_path / "c")
    assert all(map(torch.equal, again.masters(), held))
    strata.snapshot(again.model, tmp_path / "run").wait()  # another run has other files
    again.close()


def test_what_is_refused_holds_no_slots(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    strata.snapshot(case.model, tmp_path / "run").wait()
    held = slots_kept(case)
    lost = lose_a_write(case)
    handles = [strata.snapshot(case.model, tmp_path / f"{i}") for i in range(3)]
    lost.set()
    for handle in handles:
        with pytest.raises(strata.StrataError):
            handle.wait()
    assert slots_kept(case) == held
    case.close()


@pytest.mark.parametrize("ends", ["drive", LINKS])
def test_a_folder_of_the_drive_is_as_bad(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    failed = fail_once(monkeypatch, f"/{ends}")
    with pytest.raises(strata.StrataError, match=r"No snapshot in .* is known to be durable"):
        strata.snapshot(case.model, tmp_path / "run").wait()
    assert failed
    with pytest.raises(strata.StrataError, match="could not be made durable"):
        strata.snapshot(case.model, tmp_path / "run")
    assert snapshots_of(tmp_path / "run") == []
    assert not (disk / LINKS).exists()
    case.close()


def test_a_manifest_that_is_not_durable_is_the_only_loss(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    first = strata.snapshot(case.model, tmp_path / "run").wait()
    case.train(1)
    failed = fail_once(monkeypatch, ".tmp", "/manifest.json.")
    with pytest.raises(OSError, match="Input/output error"):
        strata.snapshot(case.model, tmp_path / "run").wait()
    assert failed
    assert snapshots_of(tmp_path / "run") == [first]
    case.train(1)
    third = strata.snapshot(case.model, tmp_path / "run").wait()
    assert snapshots_of(tmp_path / "run") == [first, third]
    case.close()


def test_a_snapshot_that_may_not_be_on_the_disk_is_not_named(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is there, but the folder with its name could not be synced."""
    case = Case(disk, SSD, llama())
    case.train(1)
    first = strata.snapshot(case.model, tmp_path / "run").wait()
    case.train(1)
    failed = fail_once(monkeypatch, "/run")
    with pytest.raises(OSError, match="Input/output error"):
        strata.snapshot(case.model, tmp_path / "run").wait()
    assert failed
    assert len(snapshots_of(tmp_path / "run")) == 2
    case.train(1)
    lose_a_write(case).set()
    with pytest.raises(strata.StrataError, match=f"durable is {first}"):
        strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()


def test_the_one_that_was_loaded_is_named(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    first = strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    lose_a_write(again).set()
    with pytest.raises(strata.StrataError, match=f"durable is {first}"):
        strata.snapshot(again.model, tmp_path / "elsewhere").wait()
    again.close()


def test_a_folder_that_is_not_durable_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would not sync its name."""
    fail_once(monkeypatch, f"/{tmp_path.name}")
    with pytest.raises(OSError, match="Input/output error"):
        replacing.make_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    replacing.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
