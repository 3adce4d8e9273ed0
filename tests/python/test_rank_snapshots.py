"""Snapshots of ranks: each holds its part, one commit, and they load under any number of ranks.
What each does is in rank_snapshots.py; rank_server.py starts them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Ranks
from strata._cli import main as cli
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.format import LINKS, drives_by_rank
from strata._storage.snapshots.series import snapshots_of
from test_rank_saves import each
from test_ranks import CASES, HOME, same
from variants import thorough


@pytest.fixture
def ssd(tmp_path: Path) -> dict[str, Any]:
    """Options: state rests on a drive of this test's."""
    return on_drive(tmp_path / "drive")


def on_drive(path: Path, **more: Any) -> dict[str, Any]:
    path.mkdir()
    memory = {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"}
    return {"memory": memory, "ssd_path": str(path), "page_size": "64KiB", **more}


def links(drive: dict[str, Any]) -> list[Path]:
    """What snapshots have on the drive of all ranks."""
    return sorted(Path(drive["ssd_path"]).glob(f"**/{LINKS}/*"))


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": CASES["bfloat16"],
    "8bit": {"state_dtype": "8bit"},  # with scales, which each rank has of what it owns
}


@pytest.mark.parametrize("case", ["8bit", thorough("float32"), thorough("bfloat16")])
def test_a_snapshot_goes_on_under_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], case: str
) -> None:
    ssd |= KINDS[case]
    alone, two = tmp_path / "alone", tmp_path / "two"
    one = ranks.run("rank_snapshots.takes", 1, series=str(alone), **ssd)[0]
    taken = ranks.run("rank_snapshots.takes", 2, series=str(two), **ssd)
    assert same(each(taken, "hash")) == one["hash"]
    assert same(each(taken, "folder")) == str(two / "step-000002")
    manifest = read_manifest(two / "step-000002")
    assert {chunk["rank"] for chunk in manifest["chunks"]} == {0, 1}

    elsewhere = on_drive(tmp_path / "elsewhere", **KINDS[case])
    for count, drive in ((1, ssd), (2, elsewhere), (2, ssd)):
        found = ranks.run("rank_snapshots.goes_on", count, path=str(two), **drive)
        assert same(each(found, "hash")) == one["hash"]
        drawn = each(found, "draws")
        if count == 2:  # each its own
            assert drawn == each(taken, "draws")
            assert drawn[0] != drawn[1]
        for rank in range(count):
            assert f"'rank': {rank}," in found[rank]["extra"]
            assert f"tensor([{rank}, {rank}])" in found[rank]["extra"]
        assert each(found, "adopted") == [count == 2] * count, each(found, "told")
    # Three ranks add up in another way: they are held against three that go on from `alone`.
    found = ranks.run("rank_snapshots.goes_on", 3, path=str(two), **ssd)
    expected = ranks.run("rank_snapshots.goes_on", 3, path=str(alone), **ssd)
    for key in ("loaded", "hash"):
        assert same(each(found, key)) == same(each(expected, key))
    assert same(each(found, "draws")) == taken[0]["draws"]  # those of rank 0
    found = ranks.run("rank_snapshots.goes_on", 2, path=str(alone), **ssd)
    assert same(each(found, "hash")) == one["hash"]


@pytest.mark.parametrize("staleness", [1, thorough(0), thorough(3)])
def test_updates_that_lag_are_part_of_one(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], staleness: int
) -> None:
    series = str(tmp_path / "run")
    lagging = ssd | {"update": f"lock-free:{staleness}"}
    taken = ranks.run("rank_snapshots.takes_lagging", 2, series=series, **lagging)
    assert each(taken, "moved") == [True, True]
    at_call = same(each(taken, "hash"))
    behind = set()
    for count, options in ((1, ssd), (2, ssd), (2, lagging)):
        found = ranks.run("rank_snapshots.goes_on", count, path=series, **options)
        assert same(each(found, "loaded")) == at_call
        if options is ssd:
            behind.add(same(each(found, "hash")))
        assert each(found, "adopted") == [count == 2] * count, each(found, "told")
    assert len(behind) == 1  # moments and step counts are those of the snapshot, too


@pytest.mark.thorough
def test_three_ranks_take_one(ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]) -> None:
    series = str(tmp_path / "run")
    taken = ranks.run("rank_snapshots.takes", 3, series=series, **ssd)
    loaded = set()
    for count in (1, 2, 3):
        found = ranks.run("rank_snapshots.goes_on", count, path=series, **ssd)
        loaded.add(same(each(found, "loaded")))
    assert len(loaded) == 1
    assert same(each(found, "hash")) == same(each(taken, "hash"))


@pytest.mark.thorough
def test_ranks_without_one_in_memory_load_it(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]
) -> None:
    """A run that has no SSD reads it."""
    series = str(tmp_path / "run")
    taken = ranks.run("rank_snapshots.takes", 2, series=series, **ssd)
    for count in (1, 2):
        found = ranks.run("rank_snapshots.goes_on", count, path=series)
        assert same(each(found, "hash")) == same(each(taken, "hash"))


@pytest.mark.thorough
def test_frozen_parameters_and_buffers(ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]) -> None:
    series = str(tmp_path / "run")
    taken = ranks.run("rank_snapshots.takes_kinds", 2, series=series, **ssd)
    assert taken[0]["hash"] != taken[1]["hash"]  # statistics of its own batches
    for count in (1, 2, 3):
        found = ranks.run("rank_snapshots.loads_kinds", count, series=series, **ssd)
        assert same(each(found, "hash")) == taken[0]["hash"]


def test_older_ones_go_with_all_their_parts(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]
) -> None:
    series = tmp_path / "run"
    found = ranks.run("rank_snapshots.rotates", 2, series=str(series), steps=5, **ssd)
    assert same(each(found, "there")) == ["step-000006", "step-000007"]
    assert each(found, "adopted") == [True, True]
    hashes = same(each(found, "hashes"))
    assert same(each(found, "back")) == hashes[3]
    assert same(each(found, "extra")) == {"next": 6}
    assert same(each(found, "again")) == "step-000006"
    left = [read_manifest(folder)["id"] for folder in snapshots_of(series)]
    assert len(left) == 2
    names = {f"{identity}{end}" for identity in left for end in (".json", "-0.pages")}
    assert {link.name for link in links(ssd)} == names
    assert len(links(ssd)) == 2 * len(names)
    for rank in range(2):
        assert found[rank]["held"] > 0


@pytest.mark.thorough
def test_commands_know_all_parts(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    series, copy = tmp_path / "run", tmp_path / "copy"
    taken = ranks.run("rank_snapshots.takes", 2, series=str(series), **ssd)
    drive = Path(ssd["ssd_path"])

    def told(*words: Any) -> tuple[int, str]:
        return cli.main(["snapshots", *map(str, words)]), capsys.readouterr().out

    status, said = told("ls", series)
    assert status == 0
    assert f"on {drive}/rank-0, {drive}/rank-1" in said
    assert told("ls", drive)[1].count("shared with others") == 2
    assert told("copy", series, copy)[0] == 0
    assert told("rm", series / "step-000002")[0] == 0
    assert links(ssd) == []
    for count in (1, 2):
        found = ranks.run("rank_snapshots.goes_on", count, path=str(copy), **ssd)
        assert same(each(found, "hash")) == same(each(taken, "hash"))
    ranks.run("rank_snapshots.takes", 2, series=str(series), **ssd)
    shutil.rmtree(series)
    assert told("rm", "--lost", drive)[1].count("removed what") == 2
    assert links(ssd) == []


@pytest.mark.parametrize("who", [[0, 1], [1]])
def test_one_before_step_is_refused_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], who: list[int]
) -> None:
    found = ranks.run(
        "rank_snapshots.is_refused_halfway", 2, series=str(tmp_path / "run"), who=who, **ssd
    )
    for rank, said in enumerate(each(found, "said")):
        for kind, text in said:
            if rank in who:
                assert kind == "RuntimeError"
                assert "between backward() and step()" in text
            else:
                assert kind == "CheckpointError"
                assert "rank 1" in text
    assert same(each(found, "hash")) == same(each(found, "loaded"))


def damage(folder: Path, role: str) -> None:
    """The first page of that role that rank 1 has."""
    manifest = read_manifest(folder)
    (drive,) = drives_by_rank(manifest)[1]
    chunk = next(c for c in manifest["chunks"] if c["rank"] == 1 and c[role] is not None)
    slot = chunk[role][2][0][0]
    with Path(drive["folder"], drive["file"]).open("r+b") as file:
        file.seek(slot * manifest["page_bytes"])
        file.write(b"\xff" * 64)


def ranks_that_read(outcomes: list[Outcome]) -> list[int]:
    """Those that have found the damage. All others say so of one of them."""
    found = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 1, outcome.output
        last = outcome.output.splitlines()[-1]
        if "reading slot" in last and "failed on rank" not in last:
            found.append(rank)
        else:
            assert re.search(r"strata.load\(\) failed on rank \d", last), outcome.output
    return found


def test_a_page_that_one_rank_cannot_read_ends_the_load_of_all(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]
) -> None:
    """Others are asked how far they have come."""
    series = tmp_path / "run"
    ranks.run("rank_snapshots.takes", 2, series=str(series), **ssd)
    damage(series / "step-000002", "param")
    other = ssd | {"page_size": "128KiB"}  # so that values are read
    run = ranks.start("rank_snapshots.goes_on", 2, path=str(series), **other)
    assert len(ranks_that_read(run.wait())) == 1


def test_the_call_waits_for_nobody(ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]) -> None:
    series = str(tmp_path / "run")
    found = ranks.run("rank_snapshots.calls_late", 2, series=series, **ssd)
    assert found[0]["seconds"] < 0.5
    expected = ranks.run("rank_snapshots.goes_on", 2, path=series, after=1, **ssd)
    assert same(each(found, "hash")) != same(each(expected, "loaded"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        thorough("paths", "was given different folders"),
        thorough("keeps", "was given different keep: 2 on rank 0, and 3 on rank 1"),
        thorough("arguments", "keep must be a whole number"),
        ("absent", "rank 1 has gone on without strata.snapshot"),
    ],
)
def test_ranks_that_differ_say_so(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], what: str, words: str
) -> None:
    series = tmp_path / "run"
    found = ranks.run("rank_snapshots.disagrees", 2, series=str(series), what=what, **ssd)
    for rank, said in enumerate(each(found, "said")):
        if what != "absent" or rank == 0:
            assert re.search(words, said[1]), said
    assert same(each(found, "folder")) == "step-000003"
    assert [folder.name for folder in snapshots_of(series)] == ["step-000003"]
    loaded = ranks.run("rank_snapshots.goes_on", 1, path=str(series), after=0, **ssd)
    assert same(each(found, "hash")) == loaded[0]["hash"]


def test_a_rank_that_leaves_is_named(ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]) -> None:
    found = ranks.run("rank_snapshots.leaves", 2, series=str(tmp_path / "run"), **ssd)
    assert re.search("rank 1 has (gone on without|ended)", found[0][1]), found


@pytest.mark.parametrize("victim", [thorough(0), 1])
def test_a_rank_cannot_write(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any], victim: int
) -> None:
    series = tmp_path / "run"
    found = ranks.run("rank_snapshots.cannot_write", 2, series=str(series), victim=victim, **ssd)
    assert found[victim]["said"][0] == "OSError"
    kind, words = found[1 - victim]["said"]
    assert kind == "CheckpointError"
    assert f"failed on rank {victim}: OSError: [Errno 28] No space left" in words
    assert same(each(found, "left")) == ["step-000002"]
    assert same(each(found, "folder")) == "step-000004"
    left = [folder.name for folder in snapshots_of(series)]
    assert left == ["step-000002", "step-000004"]
    assert len(links(ssd)) == 2 * 2 * len(left)
    loaded = ranks.run("rank_snapshots.goes_on", 1, path=str(series), after=0, **ssd)
    assert same(each(found, "hash")) == loaded[0]["hash"]


def test_a_rank_cannot_note_what_is_complete(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]
) -> None:
    """The manifest is there, so its pages stay as they are."""
    series = tmp_path / "run"
    found = ranks.run(
        "rank_snapshots.cannot_write", 2, series=str(series), victim=1, what="finish", **ssd
    )
    assert found[1]["said"][0] == "OSError"
    assert "failed on rank 1: OSError: [Errno 28] No space left" in found[0]["said"][1]
    assert same(each(found, "left")) == ["step-000002", "step-000003"]
    left = [folder.name for folder in snapshots_of(series)]
    assert left == ["step-000003", "step-000004"]
    for step, learned in (("step-000003", "middle"), ("step-000004", "hash")):
        loaded = ranks.run("rank_snapshots.goes_on", 1, path=str(series / step), after=0, **ssd)
        assert same(each(found, learned)) == loaded[0]["hash"]


def test_ctrl_c_ends_the_wait_and_nothing_else(
    ranks: Ranks, tmp_path: Path, ssd: dict[str, Any]
) -> None:
    found = ranks.run("rank_snapshots.interrupted", 2, series=str(tmp_path / "run"), **ssd)
    assert each(found, "ended") == ["interrupted", ""]
    assert same(each(found, "folder")) == "step-000002"
    same(each(found, "hash"))


@pytest.mark.thorough
def test_torchrun_starts_them(tmp_path: Path, ssd: dict[str, Any]) -> None:
    """Also where the user's process group is gone when a snapshot is still being written."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(HOME)!r})\n"
        "import strata, rank_scenarios as scenarios\n"
        "from rank_loops import hash_of, make_model, train, wrap\n"
        "from pathlib import Path\n"
        "torch.set_num_threads(1)\n"
        "torch.distributed.init_process_group('gloo')\n"
        "rank = torch.distributed.get_rank()\n"
        "run = scenarios.Rank(rank, torch.distributed.get_world_size(), Path())\n"
        f"model, optimizer = wrap(run, make_model(), **{ssd!r})\n"
        "if len(sys.argv) > 2:\n"
        "    strata.load(model, sys.argv[1])\n"
        "else:\n"
        "    train(run, model, optimizer, 2)\n"
        "    handle = strata.snapshot(model, sys.argv[1])\n"
        "sys.stdout.write(hash_of(model) + chr(10))  # at once, for others print, too\n"
        "torch.distributed.destroy_process_group()\n"
    )
    found = []
    for count, more in ((2, []), (2, ["load"]), (3, ["load"])):
        done = subprocess.run(
            [*(sys.executable, "-m", "torch.distributed.run"), "--standalone", "--nproc-per-node",
             str(count), str(script), str(tmp_path / "run"), *more],
            capture_output=True, text=True, check=True, cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found.append(same(done.stdout.split()))
    assert len(set(found)) == 1
