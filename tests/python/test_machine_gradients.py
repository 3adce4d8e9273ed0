"""Snapshots in the middle of an accumulation of ranks of several machines, each with its own disks:
training goes on with the bits of a run that nothing has interrupted, wherever gradients lie. What
each rank does is in rank_snapshots.py; rank_server.py starts them."""

from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from strata._storage.snapshot_files import GRAD
from test_machine_snapshots import EACH, TWICE, alone, on_machines, own
from test_rank_snapshots import KINDS, damage, ranks_that_read
from test_ranks import same
from variants import thorough


@pytest.fixture
def disks(tmp_path: Path) -> dict[str, Any]:
    """Options: state rests on a drive of each machine's."""
    return on_machines(tmp_path)


def takes(ranks: Ranks, who: int | str, series: str, where: str = "middle", **options: Any) -> str:
    """Takes one where it says, and trains on. Returns what the model is in the end."""
    scenario = "rank_snapshots.takes_halfway"
    return str(same(ranks.run(scenario, who, series=series, where=where, **options)))


def goes_on(ranks: Ranks, who: int | str, series: str, **options: Any) -> str:
    """The rest of that run."""
    return str(same(ranks.run("rank_snapshots.goes_on_halfway", who, series=series, **options)))


@pytest.mark.parametrize("where", ["middle", thorough("clipped"), thorough("queued")])
@pytest.mark.parametrize(
    ("machines", "sums"),
    [
        (EACH, "ranks"),
        *(thorough(*of) for of in ((TWICE, "machines"), (TWICE, "ranks"), (EACH, "machines"))),
    ],
)
def test_the_same_ranks_go_on(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], machines: str, sums: str, where: str
) -> None:
    if where != "clipped":
        disks |= {"max_grad_norm": 0.05}
    disks |= {"rank_sums": sums}
    series, again = own(tmp_path), f"{tmp_path}/{{machine}}/again"
    whole = takes(ranks, machines, series, "clips" if where == "clipped" else "nowhere", **disks)
    assert takes(ranks, machines, series, where, **disks) == whole
    assert goes_on(ranks, machines, series, **disks) == whole
    assert goes_on(ranks, machines, series, again=again, **disks) == whole
    assert goes_on(ranks, machines, again, **disks) == whole
    if sums == "ranks":
        one = takes(ranks, 1, str(tmp_path / "x"), where, **alone(disks))
        assert one == whole


@pytest.mark.parametrize("case", ["8bit", thorough("float32"), thorough("bfloat16")])
def test_other_ranks_go_on(ranks: Ranks, tmp_path: Path, disks: dict[str, Any], case: str) -> None:
    """What a rank owns now may lie on a disk of another machine, or of none that is left."""
    disks, shared = disks | KINDS[case], str(tmp_path / "run")
    whole = takes(ranks, EACH, shared, **disks)
    for machines in ("ba", "abab"):
        assert goes_on(ranks, machines, shared, **disks) == whole, machines
    for count in (1, 2):  # of one machine, which sees all disks
        assert goes_on(ranks, count, shared, **alone(disks)) == whole, count
    # Three ranks add up in another way: they are held against three of one machine.
    expected = goes_on(ranks, 3, shared, **alone(disks))
    assert goes_on(ranks, "aba", shared, **disks) == expected


@pytest.mark.parametrize("who", ["a", thorough("aa")])
def test_several_machines_go_on_from_one(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], who: str
) -> None:
    """Ranks of the other one own half of what lies there."""
    shared = str(tmp_path / "run")
    whole = takes(ranks, who, shared, **disks)
    for machines in (EACH, "ba", TWICE):
        assert goes_on(ranks, machines, shared, **disks) == whole, machines


@pytest.mark.thorough
def test_sums_of_machines_go_on_elsewhere(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    """Whoever has added them up, from there on bits are those of who goes on."""
    shared = str(tmp_path / "run")
    takes(ranks, TWICE, shared, **disks, rank_sums="machines")
    expected = goes_on(ranks, 4, shared, **alone(disks))
    assert goes_on(ranks, "abab", shared, **disks) == expected
    expected = goes_on(ranks, TWICE, shared, **disks, rank_sums="machines")
    assert goes_on(ranks, "bbaa", shared, **disks, rank_sums="machines") == expected


def test_updates_that_were_still_to_come(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    """They need gradients while values are loaded."""
    shared = str(tmp_path / "run")
    ranks.run("rank_snapshots.takes_waiting", "a", series=shared, **disks)
    expected = goes_on(ranks, 1, shared, **alone(disks))
    for machines in (EACH, "ba"):
        assert goes_on(ranks, machines, shared, **disks) == expected, machines


def test_nothing_is_sent_that_its_reader_alone_uses(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any]
) -> None:
    shared = str(tmp_path / "run")
    takes(ranks, EACH, shared, **disks)
    assert ranks.run("rank_snapshots.passes_on", EACH, series=shared, **disks) == [0, 0]
    assert same(ranks.run("rank_snapshots.passes_on", "ba", series=shared, **disks)) > 0


@pytest.mark.parametrize("machines", [EACH, "ba"])
def test_a_gradient_that_cannot_be_read_ends_the_load_of_all(
    ranks: Ranks, tmp_path: Path, disks: dict[str, Any], machines: str
) -> None:
    """Nobody waits for the rank that reads it, which is used by itself, or by the other one."""
    shared = tmp_path / "run"
    takes(ranks, EACH, str(shared), **disks)
    damage(shared / "step-000002", GRAD)
    run = ranks.start("rank_snapshots.goes_on_halfway", machines, series=str(shared), **disks)
    assert ranks_that_read(run.wait()) == [machines.index("b")]
