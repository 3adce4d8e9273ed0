"""Checkpoints of ranks: each writes its part, one commit, and they load under any number of ranks.
What each does is in rank_saves.py; rank_server.py starts them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from safetensors.torch import load_file
from strata._storage.checkpoint_files import read_manifest
from test_ranks import CASES, all_say, same
from variants import thorough


@pytest.fixture(scope="module")
def hash_of_three_steps(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run of two ranks that nothing has interrupted."""
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    return str(same(each(ranks.run("rank_saves.saves", 2, path=str(path)), "hash")))


def each(found: list[dict[str, Any]], key: str) -> list[Any]:
    return [value[key] for value in found]


def tensors_of(folder: Path) -> dict[str, Any]:
    """As plain tools read them."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].equal(other[name]) for name in one
    )


@pytest.mark.parametrize("case", ["ssd", thorough("bfloat16"), thorough("float32")])
def test_a_checkpoint_goes_on_under_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    alone, two = tmp_path / "alone", tmp_path / "two"
    one = ranks.run("rank_saves.saves", 1, path=str(alone), **CASES[case])[0]
    saved = ranks.run("rank_saves.saves", 2, path=str(two), **CASES[case])
    assert same(each(saved, "hash")) == one["hash"]
    assert equal(tensors_of(two), tensors_of(alone))
    steps = [[e["step"] for e in read_manifest(f)["params"]] for f in (two, alone)]
    assert steps == [[2] * len(steps[1])] * 2
    assert len(list(two.glob("moments-*"))) > 1  # each rank has written some

    for count in (1, 2):
        found = ranks.run("rank_saves.loads", count, path=str(two), **CASES[case])
        assert same(each(found, "hash")) == one["hash"]
        drawn = each(found, "draws")
        if count == 2:  # each its own
            assert drawn == each(saved, "draws")
            assert drawn[0] != drawn[1]
        assert [f"'rank': {rank}," in found[rank]["extra"] for rank in range(count)] == [
            True
        ] * count
        assert "'next': (2, 'batches')" in found[0]["extra"]
    # Three ranks add up in another way: they are held against three that go on from `alone`.
    found = ranks.run("rank_saves.loads", 3, path=str(two), **CASES[case])
    expected = ranks.run("rank_saves.loads", 3, path=str(alone), **CASES[case])
    for key in ("loaded", "hash"):
        assert same(each(found, key)) == same(each(expected, key))
    assert same(each(found, "draws")) == saved[0]["draws"]  # those of rank 0
    assert "'rank': 0," in same(each(found, "extra"))


def test_one_of_a_process_alone_goes_on_under_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    alone = ranks.run("rank_saves.saves", 1, path=path)[0]
    found = ranks.run("rank_saves.loads", 2, path=path)
    assert same(each(found, "hash")) == alone["hash"]
    assert same(each(found, "draws")) == alone["draws"]


def test_a_rank_cannot_begin_to_write(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    found = ranks.run("rank_saves.cannot_begin", 2, path=str(path), **CASES["ssd"])
    assert found[0]["said"] == ["OSError", "not here"]
    assert "failed on rank 0: OSError: not here" in found[1]["said"][1]
    assert read_manifest(path)["step"] == 3


@pytest.mark.thorough
def test_what_is_frozen_is_linked_and_buffers_are_those_of_rank_0(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    saved = ranks.run("rank_saves.saves_twice", 2, path=str(path))
    first, second = same(each(saved, "inodes"))
    assert set(first.values()) & set(second.values())
    assert set(first.values()) != set(second.values())
    assert saved[0]["hash"] != saved[1]["hash"]  # statistics of its own batches
    for count in (1, 2):
        found = ranks.run("rank_saves.loads_kinds", count, path=str(path))
        assert same(each(found, "hash")) == saved[0]["hash"]


@pytest.mark.parametrize(
    ("where", "victim", "step"),
    [("shard", 1, 2), ("shard", 0, 2), ("manifest", 0, 2), ("aside", 0, 2), ("between", 0, 3)],
)
@pytest.mark.thorough
def test_a_rank_is_killed_in_save(
    ranks: Ranks,
    tmp_path: Path,
    hash_of_three_steps: str,
    where: str,
    victim: int,
    step: int,
) -> None:
    path = tmp_path / "checkpoint"
    run = ranks.start("rank_saves.saves_under_fire", 2, path=str(path), where=where, victim=victim)
    run.await_mark("there")
    run.kill(victim)
    all_say([run.wait()[1 - victim]], f"rank {victim} has (failed or )?died")
    # The old one, or the new one, is there; and the next save leaves nothing else.
    found = ranks.run("rank_saves.loads", 2, path=str(path), after=3 - step, again=True)
    assert same(each(found, "hash")) == hash_of_three_steps
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("victim", [thorough(0), 1])
def test_a_rank_cannot_write(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    path = tmp_path / "checkpoint"
    found = ranks.run("rank_saves.cannot_write", 2, path=str(path), victim=victim)
    assert found[victim]["said"][0] == "OSError"
    kind, words = found[1 - victim]["said"]
    assert kind == "CheckpointError"
    assert f"failed on rank {victim}: OSError: [Errno 28] No space left" in words
    assert same(each(found, "old")) == 2
    assert found[0]["left"] == ["checkpoint"]
    assert read_manifest(path)["step"] == 3
    assert (
        same(each(found, "hash"))
        == ranks.run("rank_saves.loads", 1, path=str(path), after=0)[0]["hash"]
    )


@pytest.mark.thorough
def test_one_rank_sees_the_damage_and_all_refuse(ranks: Ranks, tmp_path: Path) -> None:
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    expected = same(each(ranks.run("rank_saves.saves", 2, path=str(sound)), "hash"))
    shutil.copytree(sound, damaged)
    file = max(damaged.glob("moments-*"))
    with file.open("r+b") as bytes_of:
        bytes_of.seek(-1, 2)
        last = bytes_of.read(1)[0]
        bytes_of.seek(-1, 2)
        bytes_of.write(bytes([last ^ 1]))
    found = ranks.run("rank_saves.loads_damaged", 2, path=str(damaged), sound=str(sound))
    words = each(found, "said")
    assert [kind for kind, _ in words] == ["CheckpointError"] * 2
    assert all("is damaged: checksum" in said for _, said in words)
    assert sum("failed on rank" in said for _, said in words) == 1
    assert each(found, "unchanged") == [True, True]
    assert same(each(found, "hash")) == expected


def test_a_load_drops_the_gradients_of_all(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "at")
    before, behind = same(ranks.run("rank_saves.loads_behind_a_backward", 2, path=path))
    assert behind == before


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("paths", "was given different paths"),
        ("calls", "all ranks make the same calls"),
        ("extra", "is a tensor, which|failed on rank 1: TypeError"),
    ],
)
def test_ranks_that_differ_say_so(ranks: Ranks, tmp_path: Path, what: str, words: str) -> None:
    for _, said in ranks.run("rank_saves.disagrees", 2, path=str(tmp_path / "at"), what=what):
        assert re.search(words, said), said


def test_steps_are_those_that_owners_have_made(ranks: Ranks, tmp_path: Path) -> None:
    """Of updates that lag some are made with the next one, and both are one step."""
    found = ranks.run("rank_saves.saves_lagging", 2, path=str(tmp_path / "checkpoint"))
    made = list(map(max, *each(found, "known")))
    assert min(made) < 6
    assert same(each(found, "saved")) == made
