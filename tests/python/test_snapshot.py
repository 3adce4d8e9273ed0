"""strata.snapshot keeps the state behind a step while training goes on; strata.load continues from
it bit for bit, whatever the budgets, also after a SIGKILL."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from strata._storage.checkpoint_files import CheckpointError, read_manifest, write_manifest
from strata._storage.snapshots import links as snapshot_links
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.links import Links
from strata._storage.snapshots.pages import copy_snapshot, slots_of
from strata._storage.snapshots.series import remove_snapshot, snapshots_of
from test_checkpoint import Case, llama
from variants import thorough

SSD = {"device": "512KiB", "host": "4MiB", "ssd": "256MiB"}
HOST = {"device": "8MiB", "host": "32MiB", "ssd": "256MiB"}
MODES: list[dict[str, Any]] = [
    {},
    {"update": "in_backward"},
    {"update": strata.LockFree(max_staleness=0)},
    {"state_dtype": "8bit"},
]


def drive(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir(exist_ok=True)
    return tmp_path / name


def links(path: Path) -> list[str]:
    folder = path / LINKS
    return sorted(e.name for e in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return drive(tmp_path, "drive")


@pytest.mark.parametrize("memory", [SSD, thorough(HOST)], ids=["ssd", "host"])
@pytest.mark.parametrize("mode", MODES, ids=["on_step", "in_backward", "lock_free", "8bit"])
def test_a_snapshot_continues_bit_for_bit(
    tmp_path: Path, disk: Path, memory: dict[str, str], mode: dict[str, Any]
) -> None:
    case = Case(disk, memory, llama(), **mode)
    case.train(2)
    handle = strata.snapshot(case.model, tmp_path / "run", extra={"batch": 2})
    after = case.train(3)
    assert handle.wait() == tmp_path / "run" / "step-000002"
    assert handle.complete
    expected = case.masters()
    case.close()
    for other in (SSD, HOST, {"device": "8MiB", "host": "32MiB"}):
        again = Case(drive(tmp_path, "other"), other, llama(), **mode)
        again.train(1)  # it is loaded over something else
        assert strata.load(again.model, tmp_path / "run") == {"batch": 2}
        assert again.train(3) == after
        assert all(map(torch.equal, again.masters(), expected))
        again.close()


def test_page_sizes_and_engines_may_differ(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama(), page_size="128KiB", io_engine="threads")
    case.train(2)
    handle = strata.snapshot(case.model, tmp_path / "run")
    after = case.train(2)
    handle.wait()
    case.close()
    for how in ({"page_size": "64KiB"}, {"page_size": "256KiB", "io_engine": "libaio"}):
        again = Case(drive(tmp_path, "other"), HOST, llama(), **how)
        strata.load(again.model, tmp_path / "run")
        assert again.train(2) == after
        again.close()


def test_the_newest_ones_stay(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    handles = []
    for _ in range(5):
        case.train(1)
        handles.append(strata.snapshot(case.model, tmp_path / "run", keep=2))
    for handle in handles:
        handle.wait()
    assert [f.name for f in snapshots_of(tmp_path / "run")] == ["step-000004", "step-000005"]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-000004", "step-000005"]
    assert len(links(disk)) == 4
    after = case.train(1)
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert again.train(1) == after
    handle = strata.snapshot(again.model, tmp_path / "run")
    assert handle.wait().name == "step-000006", "steps are counted on"
    again.close()


def test_each_series_has_room_and_what_others_remove_takes_none(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    session = case.state.session
    for name in ("best", "latest", "other"):
        for _ in range(3):
            case.train(1)
            strata.snapshot(case.model, tmp_path / name, keep=1).wait()
    room = session.stats()["ssd_bytes"]
    remove_snapshot(*snapshots_of(tmp_path / "best"))
    case.train(1)
    strata.snapshot(case.model, tmp_path / "fourth", keep=1).wait()
    assert session.stats()["ssd_bytes"] == room
    case.close()


def test_tensors_are_among_the_extras(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    extra = {
        "seen": torch.arange(5),
        "deep": [{"mean": torch.tensor(1.5)}],
        "empty": torch.empty(0),
    }
    strata.snapshot(case.model, tmp_path / "run", extra=extra).wait()
    extra["seen"].zero_()
    found = strata.load(case.model, tmp_path / "run")
    assert found["seen"].tolist() == [0, 1, 2, 3, 4]
    assert found["deep"][0]["mean"].item() == 1.5
    assert found["empty"].numel() == 0
    case.close()


def test_what_cannot_be_is_refused(tmp_path: Path, disk: Path) -> None:
    small = Case(disk, {"device": "512KiB", "host": "4MiB", "ssd": "4MiB"}, llama())
    with pytest.raises(strata.StrataError, match="would do"):
        strata.snapshot(small.model, tmp_path / "run")
    small.train(1)
    small.close()
    case = Case(disk, SSD, llama())
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    without = Case(tmp_path, {"device": "8MiB", "host": "32MiB"}, llama())
    with pytest.raises(strata.StrataError, match="ssd"):
        strata.snapshot(without.model, tmp_path / "run")
    without.close()


def test_a_failure_is_told_once(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000001").write_text("a file of the user's")
    handle = strata.snapshot(case.model, tmp_path / "run")
    while not handle._future.done():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="is a file"):
        case.train(1)
    case.optimizer.zero_grad()
    case.train(1)
    assert not handle.complete
    assert links(disk) == []
    strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()


def test_damage_is_noticed_before_a_page_is_used(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    manifest = read_manifest(folder)
    slot = manifest["chunks"][0]["param"][2][0][0]
    link = next((disk / LINKS).glob("*.pages"))
    with open(link, "r+b") as file:
        file.seek(slot * manifest["page_bytes"] + 5)
        file.write(b"\x99")
    again = Case(drive(tmp_path, "other"), SSD, llama(), page_size="128KiB")
    with pytest.raises(strata.StrataError, match="checksum"):
        strata.load(again.model, tmp_path / "run")
    with pytest.raises(RuntimeError, match="half-way"):
        again.train(1)
    again.close()


def test_copies_need_no_drive(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(2)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(2)
    case.close()
    copy_snapshot(folder, tmp_path / "copy" / "step-000002")
    remove_snapshot(folder)
    assert links(disk) == []
    assert not folder.exists()
    shutil.move(tmp_path / "copy", tmp_path / "moved")
    again = Case(disk, HOST, llama())
    strata.load(again.model, tmp_path / "moved")
    assert again.train(2) == after
    again.close()


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    case.close()
    complete = links(disk)
    begun = Links([str(disk)], tmp_path / "run" / "step-000009")
    for name in (begun.paths[0], disk / LINKS / f"{'0' * 16}.json.tmp", disk / LINKS / "letter"):
        Path(name).write_text("")
    (disk / LINKS / f"{'1' * 16}.json").write_text('{"of": "somebody else"}')
    snapshot_links._under_way.clear()  # as in a new process
    again = Case(disk, SSD, llama())
    strata.snapshot(again.model, tmp_path / "other").wait()
    again.close()
    left = set(links(disk)) - {e for e in links(disk) if (disk / LINKS / e).stat().st_nlink > 1}
    assert set(complete) <= set(links(disk))
    assert {"letter", f"{'1' * 16}.json"} <= left
    assert not any(begun.id in name or name.endswith(".tmp") for name in left)
    assert folder.is_dir()


def test_damaged_manifests_change_nothing(tmp_path: Path, disk: Path) -> None:
    case = Case(disk, SSD, llama())
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    before = case.masters()
    whole = read_manifest(folder)
    random.seed(int(os.environ.get("STRATA_SEED", "1")))
    faults: set[str] = set()
    for _ in range(150):
        broken = json.loads(json.dumps(whole))
        damage(broken)
        if broken == whole:
            continue
        write_manifest(folder, broken)
        try:
            strata.load(case.model, tmp_path / "run")
        except CheckpointError:
            assert all(map(torch.equal, case.masters(), before))
            continue
        except strata.StrataError as error:  # of a page, which is seen when it is read
            faults.add(error.fault)
        write_manifest(folder, whole)  # something was loaded: back to what there was
        strata.load(case.model, tmp_path / "run")
    assert faults <= {"corrupt"}
    write_manifest(folder, whole)
    strata.load(case.model, tmp_path / "run")
    assert all(map(torch.equal, case.masters(), before))
    case.close()


@pytest.mark.parametrize("memory", [HOST, SSD])
def test_only_what_is_used_of_a_page_is_written(
    tmp_path: Path, disk: Path, memory: dict[str, str]
) -> None:
    """Of units that do not fill their pages, and of no more than the rest of a sector."""
    case = Case(disk, memory, llama(), page_size="64KiB")
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    state = 12 * sum(p.numel() for p in case.model.parameters())  # float32, and two moments
    sizes = [size for *_, size in slots_of(read_manifest(folder))]
    assert state <= sum(sizes) < state + 4096 * len(sizes) < 65536 * len(sizes)
    if memory is HOST:
        assert case.state.session.stats()["snapshot_bytes"] == sum(sizes)
    copy_snapshot(folder, tmp_path / "copy")
    after = case.train(2)
    case.close()
    for where in (tmp_path / "run", tmp_path / "copy"):
        again = Case(drive(tmp_path, "other"), HOST, llama(), page_size="128KiB")
        strata.load(again.model, where)
        assert again.train(2) == after
        again.close()


@pytest.mark.parametrize("size", [0, 100, 4096, 65536, 1 << 40])
def test_a_page_has_a_number_of_bytes_that_its_elements_need(
    tmp_path: Path, disk: Path, size: int
) -> None:
    case = Case(disk, SSD, llama(), page_size="64KiB")
    case.train(1)
    folder = strata.snapshot(case.model, tmp_path / "run").wait()
    manifest = read_manifest(folder)
    page = next(p for c in manifest["chunks"] for p in c["exp_avg"][2] if p[3:] and p[3] > 4096)
    page[3] = size
    write_manifest(folder, manifest)
    with pytest.raises(CheckpointError, match=r"number of bytes|fewer bytes"):
        strata.load(case.model, tmp_path / "run")
    case.train(1)
    case.close()


def damage(manifest: dict[str, Any]) -> None:
    """Changes one value of it, somewhere below what says where pages lie."""
    place: Any = manifest
    keys: list[Any] = ["chunks", "parts", "drives", "params", "page_bytes", "moment_dtype", "id"]
    key = random.choice(keys)
    while isinstance(place[key], dict | list) and place[key]:
        place = place[key]
        key = (
            random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
        )
    place[key] = random.choice([None, -1, 1 << 70, "../x", [], 3, 0.5, {}])


def test_a_run_that_ends_completes_what_it_began(tmp_path: Path, disk: Path) -> None:
    child = os.fork()
    if child == 0:
        program = (
            "import strata, torch; from test_checkpoint import Case, llama; "
            "from pathlib import Path; from test_snapshot import SSD; "
            f"case = Case(Path({str(disk)!r}), SSD, llama()); case.train(1); "
            f"strata.snapshot(case.model, {str(tmp_path / 'run')!r})"
        )
        os.chdir(Path(__file__).parent)
        os.execv(sys.executable, [sys.executable, "-c", program])
    assert os.waitpid(child, 0)[1] == 0
    assert [f.name for f in snapshots_of(tmp_path / "run")] == ["step-000001"]
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    again.close()


def test_without_hard_links_pages_are_copied(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(disk, SSD, llama())
    case.train(2)
    taken: list[Any] = []

    class WithoutLinks:
        def __getattr__(self, name: str) -> Any:
            return getattr(case.state.session, name)

        def link_pages(self, paths: list[str]) -> bool:
            taken.extend(paths)
            return False

    first = strata.snapshot(case.model, tmp_path / "run")
    first.wait()
    case.state.snapshots._session = WithoutLinks()
    case.train(1)
    handle = strata.snapshot(case.model, tmp_path / "run", keep=1)
    after = case.train(2)
    handle.wait()
    assert taken
    assert "no hard links" in caplog.text
    assert links(disk) == []
    case.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert again.train(2) == after
    again.close()


@pytest.mark.parametrize(
    "seconds",
    [0.05, 0.3, *(thorough(s) for s in (0.0, 0.02, 0.1, 0.6))],
)
def test_a_killed_run_goes_on_from_the_newest_complete_one(tmp_path: Path, seconds: float) -> None:
    disk = drive(tmp_path, "drive")
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        case = Case(disk, SSD, llama())
        torch.manual_seed(7)
        for step in range(1000):
            case.train(1)
            handle = strata.snapshot(case.model, tmp_path / "run", keep=2)
            if step == 1:
                handle.wait()
                os.write(begins, b"!")
        os._exit(1)
    assert os.read(begun, 1) == b"!"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    plain = Case(drive(tmp_path, "plain"), SSD, llama())
    torch.manual_seed(7)
    newest = snapshots_of(tmp_path / "run")[-1]
    step = read_manifest(newest)["step"]
    plain.train(step)
    expected = plain.masters()
    after = plain.train(2)
    plain.close()
    again = Case(disk, SSD, llama())
    strata.load(again.model, tmp_path / "run")
    assert all(map(torch.equal, again.masters(), expected))
    assert again.train(2) == after
    strata.snapshot(again.model, tmp_path / "run", keep=1).wait()
    assert len(snapshots_of(tmp_path / "run")) == 1
    assert len(links(disk)) == 2, "the killed process left links"
    again.close()
