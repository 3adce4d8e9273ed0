"""Groups of processes, each of which trains a model of its own: `rank_group=`. What each process
does is in rank_groups.py; rank_server.py starts them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from rank_server import Ranks
from test_ranks import same
from variants import thorough

Found = dict[str, Any]


@pytest.fixture(autouse=True)
def leaves_nothing(ranks: Ranks) -> Iterator[None]:
    """No folder in which ranks have met is there when all have gone."""
    yield
    assert not list(ranks.temporary.glob("strata-ranks-*"))


@pytest.fixture(scope="module")
def worlds(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[Found]]:
    """By data, by rank: of two processes that are all there are."""
    path = str(tmp_path_factory.mktemp("worlds"))
    found = [ranks.run("rank_groups.trains", 2, path=path, data=data) for data in (0, 1)]
    for of in found:
        saved, loaded, went_on = (same([rank[key] for rank in of]) for key in KEYS)
        assert saved == loaded != went_on
    assert found[0][0]["saved"] != found[1][0]["saved"]
    return found


KEYS = ("saved", "loaded", "went_on")


@pytest.mark.parametrize("how", ["groups", thorough("mesh"), thorough("gpus")])
def test_two_groups_train_as_two_worlds_do(
    ranks: Ranks, tmp_path: Path, worlds: list[list[Found]], how: str
) -> None:
    found = ranks.run("rank_groups.trains", 4, path=str(tmp_path), how=how)
    assert sorted((of["data"], of["rank"]) for of in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for of in found:
        assert of == worlds[of["data"]][of["rank"]]


def test_a_process_may_be_in_groups_one_after_another(
    ranks: Ranks, worlds: list[list[Found]]
) -> None:
    expected = [[data, worlds[data][0]["saved"]] for data in (0, 1, 0)]
    first, both, last = ranks.run("rank_groups.in_turn", 3)
    assert both == expected
    assert first == expected[:2]
    assert last == expected[2:]


def test_processes_may_average_their_parameters(ranks: Ranks) -> None:
    for averaged, expected, refused in ranks.run("rank_groups.averages", 2):
        assert averaged == expected
        assert "leave async_op=True out" in refused


def test_a_mesh_of_two_dimensions_trains_one_model(ranks: Ranks, worlds: list[list[Found]]) -> None:
    """Over all of its processes, be they all there are or not."""
    saved = worlds[0][0]["saved"]
    assert ranks.run("rank_groups.over_a_mesh", 4) == [
        [[0, saved]],
        [[1, saved], [0, saved]],
        [[2, saved], [1, saved]],
        [[3, saved]],
    ]


def test_a_group_of_one_is_alone(ranks: Ranks, worlds: list[list[Found]]) -> None:
    assert ranks.run("rank_groups.alone", 2) == [[], [True, worlds[0][0]["saved"]]]


def test_a_plan_is_of_the_group(ranks: Ranks) -> None:
    groups = [0, 0, 1, 1]
    mesh = [0, 1, 0, 1]
    assert ranks.run("rank_groups.on_paper", 4) == [
        [[groups[rank], 2], [mesh[rank], 2]] for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("list", r"TypeError: rank_group must be .*new_group\(\[0, 1\]\) .*not \[0, 1\]"),
        ("stranger", "ValueError: rank_group: this process is not in that group: .*members"),
        ("mesh of others", "ValueError: rank_group: this process is not in that group"),
        (
            "mesh",
            r"ValueError: .*3 dimensions \('other', 'dp', 'tp'\), .*"
            r"mesh\['tp'\], or mesh\[\('dp', 'tp'\)\]",
        ),
        ("unnamed", r"ValueError: .*3 dimensions, .*pass a part of it"),
        ("destroyed", "ValueError: .*does not know that group any more"),
    ],
)
def test_what_is_no_group_is_refused(ranks: Ranks, what: str, words: str) -> None:
    first, second = ranks.run("rank_groups.is_refused", 2, what=what)
    assert len(second) == 2
    assert len(first) == (0 if what == "mesh of others" else 2)
    for said in [*first, *second]:
        assert re.search(words, said), said


def test_a_process_without_others_has_no_group() -> None:
    model = torch.nn.Linear(8, 8)
    with pytest.raises(TypeError, match="rank_group must be a process group"):
        strata.wrap(model, torch.optim.AdamW(model.parameters()), rank_group="world")  # type: ignore[arg-type]
