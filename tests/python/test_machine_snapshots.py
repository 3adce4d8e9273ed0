"""Snapshots of ranks of several machines, each with its own disks, and its own folder of the series
unless all see one: one commit, and they load where their parts can be reached. The machines are
processes of one host that do not see each other's disks. What each does is in rank_snapshots.py;
rank_server.py starts them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_server import Outcome, Ranks
from strata._cli import main as cli
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.format import FORMAT, LINKS
from strata._storage.snapshots.series import snapshots_of
from test_rank_saves import each
from test_rank_snapshot_ends import (
    STEPS,
    chosen_for,
    kill_at_any_moment,
    kill_in_a_commit,
    step_that_trains_on,
)
from test_ranks import same
from variants import thorough

EACH = "ab"  # by rank: its machine
TWICE = "aabb"


@pytest.fixture
def disks(tmp_path: Path) -> dict[str, Any]:
    """Options: state rests on a drive of each machine's."""
    return on_machines(tmp_path)


def on_machines(root: Path) -> dict[str, Any]:
    for machine in "abc":
        (root / machine / "drive").mkdir(parents=True)
    memory = {"device": "1MiB", "host": "10MiB", "ssd": "1GiB"}
    own = f"{root}/{{machine}}/drive"
    return {"memory": memory, "ssd_path": own, "page_size": "64KiB", "hides": str(root)}


def own(root: Path) -> str:
    """The series that each machine has for itself."""
    return f"{root}/{{machine}}/run"


def ids_in(series: Path) -> list[str]:
    return [read_manifest(folder)["id"] for folder in snapshots_of(series)]


def check_drives(root: Path, machines: str, ids: Sequence[str]) -> None:
    """Each machine has links of these snapshots, one of each of its ranks, and nothing else."""
    for machine in sorted(set(machines)):
        found = sorted(path.name for path in (root / machine).glob(f"drive/rank-*/{LINKS}/*"))
        names = [f"{identity}{end}" for identity in ids for end in (".json", "-0.pages")]
        assert found == sorted(names * machines.count(machine)), machine


def alone(disks: dict[str, Any]) -> dict[str, Any]:
    """For ranks of one machine."""
    drive = Path(disks["hides"]) / "drive"
    drive.mkdir(exist_ok=True)
    return {key: disks[key] for key in disks if key != "hides"} | {"ssd_path": str(drive)}


def all_refuse(outcomes: list[Outcome], pattern: str) -> None:
    """Every one of them ended with a CheckpointError of these words."""
    for outcome in outcomes:
        assert outcome.code == 1, outcome.output
        last = [line for line in outcome.output.splitlines() if "CheckpointError" in line][-1]
        assert re.search(pattern, last), outcome.output


@pytest.mark.parametrize("machines", [EACH, thorough(TWICE)])
def test_machines_share_nothing_but_the_network(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], machines: str
) -> None:
    one = ranks.run("rank_snapshots.takes", 1, series=str(tmp_path / "x"), **alone(disks))[0]
    taken = ranks.run("rank_snapshots.takes", machines, series=own(tmp_path), **disks)
    assert same(each(taken, "hash")) == one["hash"]
    folders = [tmp_path / machine / "run" / "step-000002" for machine in machines]
    assert each(taken, "folder") == [str(folder) for folder in folders]
    manifest = read_manifest(folders[0])
    assert manifest["snapshot"] == FORMAT
    assert manifest["machines"] == list(machines)
    for folder in folders:
        assert read_manifest(folder) == manifest
        assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "state.bin"]
        assert [p.name for p in folder.parent.iterdir()] == ["step-000002"]
    check_drives(tmp_path, machines, [manifest["id"]])

    found = ranks.run("rank_snapshots.goes_on", machines, path=own(tmp_path), **disks)
    assert each(found, "adopted") == [True] * len(machines), each(found, "told")
    assert same(each(found, "hash")) == one["hash"]
    assert each(found, "draws") == each(taken, "draws")
    for rank in range(len(machines)):
        assert f"'rank': {rank}}}" in found[rank]["extra"]


@pytest.mark.parametrize(
    ("machines", "kind"),
    [("ba", {"state_dtype": "8bit"}), thorough("aab", {}), thorough("abc", {})],
)
def test_other_ranks_of_these_machines_read_for_each_other(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], machines: str, kind: dict[str, Any]
) -> None:
    """What a rank owns now may lie on a disk of another machine."""
    disks, shared = disks | kind, str(tmp_path / "run")
    ranks.run("rank_snapshots.takes", EACH, series=shared, **disks)
    found = ranks.run("rank_snapshots.goes_on", machines, path=shared, **disks)
    assert not any(each(found, "adopted"))
    expected = ranks.run("rank_snapshots.takes", 1, series=str(tmp_path / "x"), **alone(disks))
    loaded = ranks.run(
        "rank_snapshots.goes_on", len(machines), path=str(tmp_path / "x"), **alone(disks)
    )
    assert same(each(found, "loaded")) == same(each(loaded, "loaded"))
    if len(machines) == 2:
        assert same(each(found, "hash")) == expected[0]["hash"]


def test_updates_that_lag_are_part_of_one(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    lagging = disks | {"update": "lock-free:1"}
    taken = ranks.run("rank_snapshots.takes_lagging", EACH, series=own(tmp_path), **lagging)
    found = ranks.run("rank_snapshots.goes_on", EACH, path=own(tmp_path), **lagging)
    assert each(found, "adopted") == [True, True], each(found, "told")
    assert same(each(found, "loaded")) == same(each(taken, "hash"))


@pytest.mark.thorough
def test_a_series_that_all_see_has_no_copies(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    shared = tmp_path / "run"
    found = ranks.run("rank_snapshots.rotates", TWICE, series=str(shared), steps=4, **disks)
    assert same(each(found, "there")) == ["step-000005", "step-000006"]
    assert each(found, "adopted") == [True] * 4
    assert same(each(found, "back")) == same(each(found, "hashes"))[2]
    check_drives(tmp_path, TWICE, ids_in(shared))
    assert not (tmp_path / "b" / "run").exists()


def test_older_ones_go_on_all_machines(ranks: Ranks, tmp_path: Path, disks: dict[str, Any]) -> None:
    found = ranks.run("rank_snapshots.rotates", EACH, series=own(tmp_path), steps=5, **disks)
    assert same(each(found, "there")) == ["step-000006", "step-000007"]
    assert each(found, "adopted") == [True, True]
    assert same(each(found, "back")) == same(each(found, "hashes"))[3]
    ids = ids_in(tmp_path / "a" / "run")
    assert len(ids) == 2
    assert ids_in(tmp_path / "b" / "run") == ids
    check_drives(tmp_path, EACH, ids)


def test_what_rank_0_removes_goes_on_all_machines(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    """Of snapshots in folders of their own: there is room for one beside that which is taken."""
    series = tmp_path / "run"
    assert ranks.run("rank_snapshots.replaces", EACH, series=str(series), **disks) == [1, 1]
    check_drives(tmp_path, EACH, ids_in(max(tmp_path.glob("run-*"))))


@pytest.mark.thorough
def test_what_no_rank_reaches_is_named(ranks: Ranks, tmp_path: Path, disks: dict[str, Any]) -> None:
    shared = tmp_path / "run"
    ranks.run("rank_snapshots.takes", EACH, series=str(shared), **disks)
    words = rf"pages of rank 1 are on b in {tmp_path}/b/drive/rank-1, which .* sees: start a rank"
    for machines in ("a", "ac"):
        outcomes = ranks.start("rank_saves.loads", machines, path=str(shared), **disks).wait()
        all_refuse(outcomes, words)
    # The machines that have taken it go on from it all the same.
    found = ranks.run("rank_snapshots.goes_on", EACH, path=str(shared), **disks)
    assert each(found, "adopted") == [True, True]


def test_a_machine_without_a_copy_is_named(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    ranks.run("rank_snapshots.takes", EACH, series=own(tmp_path), **disks)
    (tmp_path / "b" / "run").rename(tmp_path / "b" / "moved")
    outcomes = ranks.start("rank_saves.loads", EACH, path=own(tmp_path), **disks).wait()
    all_refuse(
        outcomes, f"rank 0 on a has step-000002 in {tmp_path}/a/run; rank 1 on b has none in"
    )


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("keeps", "was given different keep: 2 on rank 0, and 3 on rank 1"),
        ("arguments", "keep must be a whole number"),
        ("absent", "rank 1 has gone on without strata.snapshot"),
    ],
)
def test_ranks_that_differ_say_so(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], what: str, words: str
) -> None:
    found = ranks.run("rank_snapshots.disagrees", EACH, series=own(tmp_path), what=what, **disks)
    for rank, said in enumerate(each(found, "said")):
        if what != "absent" or rank == 0:
            assert re.search(words, said[1]), said
    assert same(each(found, "folder")) == "step-000003"
    assert len(ids_in(tmp_path / "a" / "run")) == 1
    check_drives(tmp_path, EACH, ids_in(tmp_path / "b" / "run"))


@pytest.mark.thorough
def test_ranks_of_one_machine_name_one_folder(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    series = str(tmp_path / "run")  # each rank another one, behind it
    found = ranks.run("rank_snapshots.disagrees", "abb", series=series, what="paths", **disks)
    for said in each(found, "said"):
        assert re.search("given different folders: .* on rank 1, and .* on rank 2", said[1]), said


@pytest.mark.parametrize("victim", [0, thorough(1)])
def test_a_machine_cannot_write(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], victim: int
) -> None:
    series = own(tmp_path)
    found = ranks.run("rank_snapshots.cannot_write", EACH, series=series, victim=victim, **disks)
    assert found[victim]["said"][0] == "OSError"
    kind, words = found[1 - victim]["said"]
    assert kind == "CheckpointError"
    assert f"failed on rank {victim}: OSError: [Errno 28] No space left" in words
    assert same(each(found, "left")) == ["step-000002"]
    ids = ids_in(tmp_path / "a" / "run")
    assert len(ids) == 2
    check_drives(tmp_path, EACH, ids)
    loaded = ranks.run("rank_saves.loads", EACH, path=series, after=0, **disks)
    assert same(each(found, "hash")) == same(each(loaded, "hash"))


def test_drives_without_hard_links_are_refused(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    found = ranks.run("rank_snapshots.without_links", EACH, series=own(tmp_path), **disks)
    for said in found:
        assert re.search("have no hard links, which snapshots of several machines need", said[1])


@pytest.fixture(scope="module")
def hashes(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By step, from 2 on, of a run that nothing has interrupted."""
    options = on_machines(tmp_path_factory.mktemp("whole"))
    return list(same(ranks.run("rank_snapshots.hashes_by_step", EACH, steps=STEPS + 1, **options)))


def check_what_is_left(
    ranks: Ranks, root: Path, disks: dict[str, Any], hashes: list[str], series: str
) -> int:
    """The newest snapshot has the bits of its step, training goes on to those of the next one, and
    nothing else is left. Returns the step."""
    step = step_that_trains_on(ranks, EACH, hashes, series=series, **disks)
    places = sorted({Path(series.replace("{machine}", machine)) for machine in EACH})
    ids = ids_in(places[0])
    for place in places:
        assert ids_in(place) == ids
        assert sorted(p.name for p in place.iterdir()) == sorted(
            folder.name for folder in snapshots_of(place)
        )
    check_drives(root, EACH, ids)
    return step


@pytest.mark.parametrize(
    ("where", "victim", "step"),
    [
        ("links", 0, 2),
        ("links", 1, 2),
        ("part", 1, 2),
        ("manifest", 0, 2),
        ("copy", 1, 2),
        ("finish", 0, 3),  # rank 0 has it, and the other machine not: the next run brings it there
        ("finish", 1, 3),
        ("rotate", 0, 3),
        ("rotate", 1, 3),
    ],
)
@pytest.mark.thorough
def test_a_rank_is_killed_in_a_commit(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], hashes: list[str], where: str,
    victim: int, step: int,
) -> None:  # fmt: skip
    series = own(tmp_path)
    kill_in_a_commit(ranks, EACH, where, victim, series=series, **disks)
    assert check_what_is_left(ranks, tmp_path, disks, hashes, series) == step


@pytest.mark.thorough
def test_a_machine_that_has_one_more_removes_it(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], hashes: list[str]
) -> None:
    """Rank 1 is killed when rank 0 has removed the older one. Its machine has two then, and their
    slots in its budget, where only one is to be kept."""
    series = own(tmp_path)
    options = disks | {"series": series, "keep": 1}
    kill_in_a_commit(ranks, EACH, "rotate", 1, **options)
    a, b = (tmp_path / machine / "run" for machine in EACH)
    assert [len(snapshots_of(place)) for place in (a, b)] == [1, 2]
    assert step_that_trains_on(ranks, EACH, hashes, **options) == 3
    assert len(ids_in(a)) == 1
    assert ids_in(a) == ids_in(b)
    check_drives(tmp_path, EACH, ids_in(a))


def test_a_copy_that_was_lost_comes_from_rank_0(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], hashes: list[str]
) -> None:
    """Rank 0 is killed when it has the manifest, and machine b has nothing but pages and links."""
    series = own(tmp_path)
    kill_in_a_commit(ranks, EACH, "finish", 0, series=series, **disks)
    a, b = (tmp_path / machine / "run" for machine in EACH)
    assert [folder.name for folder in snapshots_of(a)] == ["step-000002", "step-000003"]
    assert [folder.name for folder in snapshots_of(b)] == ["step-000002"]
    found = ranks.run("rank_snapshots.goes_on", EACH, path=series, after=0, **disks)
    assert each(found, "adopted") == [True, True]
    assert same(each(found, "hash")) == hashes[1]
    assert ids_in(a) == ids_in(b)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.thorough
def test_a_rank_is_killed_at_any_moment(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], hashes: list[str], number: int
) -> None:
    chosen = chosen_for(number)
    victim = chosen.randrange(2)
    series = chosen.choice([own(tmp_path), str(tmp_path / "run")])
    kill_at_any_moment(ranks, EACH, victim, chosen, series=series, **disks)
    check_what_is_left(ranks, tmp_path, disks, hashes, series)


def test_commands_on_one_of_the_machines(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = ranks.run("rank_snapshots.takes", EACH, series=own(tmp_path), **disks)

    def told(*words: Any) -> tuple[int, str]:
        status = cli.main(["snapshots", *map(str, words)])
        return status, "".join(capsys.readouterr())

    a, b = (tmp_path / machine for machine in EACH)
    status, said = told("ls", a / "run")
    assert status == 0
    assert f"on a: {a}/drive/rank-0, b: {b}/drive/rank-1" in said
    assert "is not seen" not in said
    assert told("copy", a / "run", tmp_path / "copy")[0] == 0  # this process sees all of them
    found = ranks.run("rank_snapshots.goes_on", 2, path=str(tmp_path / "copy"), **alone(disks))
    assert same(each(found, "hash")) == same(each(taken, "hash"))

    b.rename(tmp_path / "gone")
    assert f"{b}/drive/rank-1/{LINKS}/" in (said := told("ls", a / "run")[1])
    assert "is not seen from here" in said
    status, said = told("copy", a / "run", tmp_path / "another")
    assert status == 1
    assert f"pages of rank 1 are on b in {b}/drive/rank-1, which nobody here sees" in said
    said = told("rm", a / "run" / "step-000002")[1]
    assert f"{b}/drive/rank-1 of b is not seen from here: do the same there" in said
    assert list(a.glob(f"drive/rank-0/{LINKS}/*")) == []
    (tmp_path / "gone").rename(b)
    assert len(ids_in(b / "run")) == 1
    assert told("rm", b / "run" / "step-000002")[0] == 0
    check_drives(tmp_path, EACH, [])
