"""strata.load of a snapshot on the same file system reads nothing: the session goes on from its
slots. The bits are those of a load that reads, and nothing that a snapshot holds is overwritten."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strata
import torch
from strata._core import SavedPages
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.pages import bytes_of, copy_snapshot, page_paths, slots_of
from strata._storage.snapshots.series import remove_snapshot, snapshots_of
from test_checkpoint import Case, llama
from test_snapshot import HOST, MODES, SSD, drive, links

DEVICE = {"device": "64MiB", "host": "32MiB", "ssd": "256MiB"}
HALF = {"device": "1MiB", "host": "6MiB", "ssd": "256MiB"}
IDS = ["on_step", "in_backward", "lock_free", "8bit"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return drive(tmp_path, "drive")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Whether and why pages were read, of the loads since the last call."""
    caplog.set_level(logging.INFO, "strata")

    def tell() -> str:
        kinds = ("the pages of", "page by page")
        texts = [record.getMessage() for record in caplog.records]
        text = "\n".join(t for t in texts if any(kind in t for kind in kinds))
        caplog.clear()
        return text

    return tell


ADOPTED = "when they are needed"


def verify(folder: Path) -> None:
    """Every page that a snapshot names is as it was."""
    manifest = read_manifest(folder)
    paths = page_paths(manifest, folder)
    slots = slots_of(manifest)
    pages = SavedPages(["/"] * len(paths), paths, manifest["page_bytes"], slots)
    memory = torch.empty(manifest["page_bytes"] + 4096, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 4096
    for slot, *_ in slots:
        pages.read([slot], address)


def read_bytes(case: Case) -> int:
    return case.state.session.stats()["ssd to host bytes"]


FROM = {"ssd": SSD, "half": HALF, "host": HOST, "device": DEVICE}
QUICK = {("on_step", "ssd"), ("in_backward", "half"), ("lock_free", "host"), ("8bit", "device")}
CASES = [
    pytest.param(mode, FROM[place], marks=[pytest.mark.thorough] * ((name, place) not in QUICK))
    for name, mode in zip(IDS, MODES, strict=True)
    for place in FROM
]


@pytest.mark.parametrize(("mode", "memory"), CASES)
def test_it_goes_on_bit_for_bit_and_reads_nothing_ahead(
    tmp_path: Path, disk: Path, told: Callable[[], str], mode: dict[str, Any], memory: Any
) -> None:
    case, run = Case(disk, memory, llama(), **mode), tmp_path / "run"
    torch.manual_seed(3)
    case.train(2)
    strata.snapshot(case.model, run, extra={"batch": 2}).wait()
    expected = case.masters()
    after, last = case.train(3), case.masters()
    case.close()
    for other in FROM.values():
        again = Case(disk, other, llama(), **mode)
        again.train(1)
        before = read_bytes(again)
        assert strata.load(again.model, run) == {"batch": 2}
        assert ADOPTED in (why := told()), why
        pages = read_manifest(snapshots_of(run)[0])
        size = bytes_of(pages)
        assert read_bytes(again) - before < size / 3, "more than the next step's first units"
        assert again.train(3) == after
        assert all(map(torch.equal, again.masters(), last))
        strata.load(again.model, run)
        assert ADOPTED in (why := told()), why
        assert all(map(torch.equal, again.masters(), expected))
        again.close()
        told()
    verify(snapshots_of(run)[0])


def test_runs_go_on_in_one_file_and_nothing_held_is_overwritten(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    plain = Case(drive(tmp_path, "plain"), HOST, llama())
    torch.manual_seed(3)
    expected = plain.train(12)
    plain.close()
    losses: list[float] = []
    inodes = set()
    for number in range(6):
        case = Case(disk, (SSD, HALF, HOST)[number % 3], llama())
        torch.manual_seed(3)
        if number:
            strata.load(case.model, tmp_path / "run")
            assert ADOPTED in told()
        for _ in range(2):
            losses += case.train(1)
            strata.snapshot(case.model, tmp_path / "run", keep=2).wait()
            for folder in snapshots_of(tmp_path / "run"):
                verify(folder)
        kept = [f.name for f in snapshots_of(tmp_path / "run")]
        assert kept == [f"step-{2 * number + i:06d}" for i in (1, 2)]
        assert len(links(disk)) == 4
        case.close()
        inodes |= {p.stat().st_ino for p in (disk / LINKS).glob("*.pages")}
    assert losses == expected
    assert len(inodes) == 1, "the file goes from run to run"


def test_files_on_several_drives_are_taken_over_together(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    drives: Any = [disk, drive(tmp_path, "second")]
    case = Case(drives, SSD, llama())
    case.train(2)
    strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(4)
    case.close()
    losses = []
    for order in (drives, drives[::-1]):
        again = Case(order, SSD, llama())
        strata.load(again.model, tmp_path / "run")
        assert ADOPTED in (why := told()), why
        losses += again.train(2)
        for folder in snapshots_of(tmp_path / "run"):
            verify(folder)
        strata.snapshot(again.model, tmp_path / "run").wait()
        again.close()
    assert losses == after


def test_a_snapshot_behind_a_load_writes_nothing(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    case = Case(disk, HOST, llama())
    case.train(2)
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    for memory in (SSD, HOST, DEVICE):
        again = Case(disk, memory, llama())
        strata.load(again.model, tmp_path / "run")
        assert ADOPTED in told()
        folder = strata.snapshot(again.model, tmp_path / "other" / memory["device"]).wait()
        assert again.state.session.stats()["snapshot_bytes"] == 0
        expected = again.masters()
        again.train(2)
        verify(folder)
        again.close()
        third = Case(disk, HALF, llama())
        strata.load(third.model, folder)
        assert all(map(torch.equal, third.masters(), expected))
        third.close()


def test_it_is_read_where_it_cannot_be_adopted(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    case = Case(disk, SSD, llama())
    case.train(2)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(2)
    case.close()
    copy_snapshot(folder, tmp_path / "copy" / "step-000002")
    shutil.copytree(folder, tmp_path / "same" / "step-000002")
    link = next((disk / LINKS).glob("*.pages"))
    small: dict[str, Any] = SSD | {"ssd": link.stat().st_size - 65536}
    tight: dict[str, Any] = {"device": "8MiB", "host": "32MiB"}
    ways: list[tuple[str, Path, dict[str, Any], dict[str, Any]]] = [
        ("copies", tmp_path / "copy", SSD, {}),
        ("another size", tmp_path / "run", SSD, {"page_size": "128KiB"}),
        ("another form", tmp_path / "run", SSD, {"state_dtype": "8bit"}),
        ("ssd=", tmp_path / "run", small, {}),
        ("0 drives|names 0|ssd_path", tmp_path / "run", tight, {}),
        ("another folder", tmp_path / "same", SSD, {}),
    ]
    for why, path, memory, how in ways:
        again = Case(disk, memory, llama(), **how)
        strata.load(again.model, path)
        text = told()
        assert "page by page" in text
        assert any(part in text for part in why.split("|")), text
        if "state_dtype" not in how:
            assert again.train(2) == after
        again.close()
    second = drive(tmp_path, "second")
    os.link(link, second / "a name of the user's")
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert "a page file has 2 names, 1 of snapshots" in told()
    assert again.train(2) == after
    again.close()
    verify(folder)


def test_two_sessions_never_share_what_they_write(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    case = Case(disk, SSD, llama())
    case.train(2)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(3)
    case.close()
    first = Case(disk, SSD, llama())
    second = Case(disk, HOST, llama())
    state = torch.random.get_rng_state()
    strata.load(first.model, tmp_path / "run")
    assert ADOPTED in told()
    strata.load(second.model, tmp_path / "run")
    assert "another session writes to this page file" in told()
    del state
    losses: dict[str, list[float]] = {"first": [], "second": []}
    for name, one in (("first", first), ("second", second)):
        strata.load(one.model, tmp_path / "run")  # and again, to the same state
        losses[name] = one.train(3)
    assert losses == {"first": after, "second": after}
    verify(folder)
    first.close()
    second.close()


def test_a_run_goes_back_to_its_own_snapshot(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    case = Case(disk, HALF, llama())
    case.train(2)
    strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(2)
    for _ in range(3):
        strata.load(case.model, tmp_path / "run")
        assert ADOPTED in told()
        assert case.train(2) == after
    strata.snapshot(case.model, tmp_path / "run", keep=1).wait()
    assert len(snapshots_of(tmp_path / "run")) == 1
    verify(snapshots_of(tmp_path / "run")[0])
    case.close()


def test_room_of_snapshots_that_go_is_used_again(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    for _ in range(2):
        case.train(1)
        strata.snapshot(case.model, tmp_path / "run", keep=2).wait()
    room = case.state.session.stats()["ssd_bytes"]
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    remove_snapshot(snapshots_of(tmp_path / "run")[0])  # as another process does
    for _ in range(4):
        again.train(1)
        strata.snapshot(again.model, tmp_path / "run", keep=2).wait()
    assert again.state.session.stats()["ssd_bytes"] <= room
    again.close()


def test_a_damaged_page_is_named_when_it_is_first_used(
    tmp_path: Path, disk: Path, told: Callable[[], str]
) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    old = strata.snapshot(case.model, tmp_path / "run").wait()
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    manifest = read_manifest(folder)
    slot = manifest["chunks"][0]["exp_avg"][2][0][0]
    link = Path(page_paths(manifest, folder)[0])
    with open(link, "r+b") as file:
        file.seek(slot * manifest["page_bytes"] + 5)
        file.write(b"\x99")
    again = Case(disk, HOST, llama())
    strata.load(again.model, tmp_path / "run")
    assert ADOPTED in told()
    with pytest.raises(strata.StrataError, match="checksum") as raised:
        again.train(2) and again.masters()
    assert raised.value.fault == "corrupt"
    assert raised.value.path == str(link)
    assert raised.value.offset == slot * manifest["page_bytes"]
    for _ in range(2):
        with pytest.raises(strata.StrataError, match="checksum"):
            strata.snapshot(again.model, tmp_path / "run", keep=1)
    again.close()
    assert snapshots_of(tmp_path / "run") == [old, folder]
    other = Case(disk, SSD, llama())
    strata.load(other.model, old)
    other.train(2)
    other.close()


def test_what_is_refused_behind_a_load_leaves_their_slots_alone(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(disk, SSD, llama())
    for name in ("other", "run"):
        case.train(1)
        strata.snapshot(case.model, tmp_path / name).wait()
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    again.train(1)
    with monkeypatch.context() as patch:

        def refuse(_: int) -> int:
            raise strata.StrataError("no")

        patch.setattr(again.state.snapshots, "_session", SimpleNamespace(begin_snapshot=refuse))
        with pytest.raises(strata.StrataError, match="no"):
            strata.snapshot(again.model, tmp_path / "run", keep=3)
    for _ in range(4):
        again.train(1)
        strata.snapshot(again.model, tmp_path / "run", keep=3).wait()
        for folder in snapshots_of(tmp_path / "other") + snapshots_of(tmp_path / "run"):
            verify(folder)
    again.close()


PROGRAM = """
import sys, torch, strata
from pathlib import Path
from types import SimpleNamespace
from test_checkpoint import Case, llama
import test_adopt, test_snapshot
disk, run, memory = Path(sys.argv[1]), Path(sys.argv[2]), getattr(test_adopt, sys.argv[3])
case = Case(disk, memory, llama())
print("wrapped", flush=True)
strata.load(case.model, run)
print("loaded", flush=True)
for step in range(1000):
    case.train(1)
    if len(sys.argv) > 4:
        strata.snapshot(case.model, run, keep=2).wait()
"""


@pytest.mark.parametrize("memory", ["SSD", "HOST"])
@pytest.mark.parametrize("takes", [False, True], ids=["trains", "takes more"])
@pytest.mark.thorough
def test_a_process_killed_at_any_moment_leaves_it_loadable(
    tmp_path: Path, disk: Path, told: Callable[[], str], memory: str, takes: bool
) -> None:
    random.seed(int(os.environ.get("STRATA_SEED", "1")))
    case = Case(disk, SSD, llama())
    torch.manual_seed(5)
    case.train(2)
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    for _ in range(max(3, int(os.environ.get("STRATA_KILLS", "0")) // 10)):  # some seconds each
        arguments = [str(disk), str(tmp_path / "run"), memory] + ["snapshots"] * takes
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(random.uniform(0, 0.4))
        child.send_signal(signal.SIGKILL)
        child.wait()
        for folder in snapshots_of(tmp_path / "run"):
            verify(folder)
    step = read_manifest(snapshots_of(tmp_path / "run")[-1])["step"]
    plain = Case(drive(tmp_path, "plain"), HOST, llama())
    torch.manual_seed(5)
    plain.train(step)
    expected = plain.masters()
    after = plain.train(2)
    plain.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert ADOPTED in told()
    assert all(map(torch.equal, again.masters(), expected))
    assert again.train(2) == after
    again.close()
