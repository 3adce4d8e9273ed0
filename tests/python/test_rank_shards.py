"""Models whose parameters are DTensors of a tensor-parallel mesh. What each process does is in
rank_shards.py; rank_server.py starts them."""

import re
from typing import Any

import pytest
from rank_server import Ranks
from variants import thorough


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequence": True, "clip": 0.5},
        thorough({"clip": 0.5, "inside": True}),
        {"update": "in_backward"},
        {"activations": "recompute", "sequence": True},
        thorough({"activations": "swap"}),
        {"kind": "tied", "clip": 0.5, "rule": "sgd"},
        thorough({"kind": "frozen", "rule": "adagrad"}),
        thorough({"kind": "checkpoint"}),
        thorough({"kind": "outside", "rule": "sgd"}),
        {"ssd_path": "own", "memory": {"device": "2MiB", "host": "4MiB", "ssd": "1GiB"}},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_shards_train_as_dtensors_do(ranks: Ranks, options: dict[str, Any]) -> None:
    for of in ranks.run("rank_shards.trains", 2, **options):
        assert of["distance"] < 1e-5
        assert of["kinds"] == ["PagedParameter"]
        assert all(off < 1e-5 for off in of["norms"])
        # The model is the caller's again, and its parameters are the same objects.
        assert of["back"] == 0
        more = 6 * options.get("sequence", False) + (options.get("kind") == "tied")
        assert of["dtensors"] == 14 + more
        assert of["same_objects"]
        assert of["hollow"]  # meanwhile they had no memory
        assert of["answers"] == 0


@pytest.mark.parametrize("inside", [False, True])
def test_norms_are_of_the_whole(ranks: Ranks, inside: bool) -> None:
    """Of clip_grad_norm_(), and of step()."""
    found = ranks.run("rank_shards.trains", 2, clip=0.5, inside=inside, rule="sgd")
    assert all(len(of["norms"]) == 4 for of in found)
    assert all(of["distance"] < 1e-5 for of in found)
    assert all(off < 1e-5 for of in found for off in of["norms"])


@pytest.mark.parametrize(
    "options",
    [
        thorough({"clip": 0.5}),
        {"clip": 0.5, "idle": True, "rank_gradients": "sum"},
        thorough({"update": "in_backward"}),
    ],
    ids=str,
)
def test_a_mesh_of_two_dimensions_trains_copies(ranks: Ranks, options: dict[str, Any]) -> None:
    for distance in ranks.run("rank_shards.trains_in_groups", 4, **options):
        assert distance < 1e-5


@pytest.mark.thorough
def test_four_processes_share_each_parameter(ranks: Ranks) -> None:
    for of in ranks.run("rank_shards.trains", 4, clip=0.5, sequence=True):
        assert of["distance"] < 1e-5


def test_each_process_saves_and_loads_its_shards(ranks: Ranks) -> None:
    assert ranks.run("rank_shards.saves_and_loads", 2) == [True, True]


def test_files_of_whole_parameters_are_cut(ranks: Ranks) -> None:
    for distance in ranks.run("rank_shards.reads_files", 2):
        assert distance < 1e-5


def test_all_leave_out_what_is_not_finite_in_one(ranks: Ranks) -> None:
    assert ranks.run("rank_shards.skips", 2) == [[0.0, False]] * 2


def test_norms_of_gradients_that_are_kept_are_of_now(ranks: Ranks) -> None:
    assert ranks.run("rank_shards.keeps_gradients", 2) == [[True] * 3] * 2


def test_all_scale_by_the_same_norm(ranks: Ranks) -> None:
    """Of gradients in float16, whose rounding the sums do not know."""
    (norms, sums), other = ranks.run("rank_shards.scales", 2)
    assert other == [norms, sums]
    assert all(norm > 0.5 for norm in norms)


def test_a_wrap_that_fails_leaves_dtensors_and_their_gradients(ranks: Ranks) -> None:
    assert ranks.run("rank_shards.fails_and_goes_on", 2) == [[True, True]] * 2


def test_who_looks_at_the_dtensors_that_were_given_is_told(ranks: Ranks) -> None:
    for said in ranks.run("rank_shards.looks_at_old", 2):
        assert "given to strata.wrap(), and its shard trains in its place" in said


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("partial", r"'blocks.0.norm.weight' is a DTensor with Partial\(sum\).*redistribute"),
        ("empty", r"'few' is a DTensor with \(Shard\(dim=0\),\), of which this process has no"),
        ("group", r"DTensor over this process and process \d, which .* rank_group=.*mesh\['dp'\]"),
        ("units", "max_unit_norm= would clip each shard by itself: pass max_grad_norm="),
        ("lock_free", "max_grad_norm= needs the gradients of all its shards.*update='on_step'"),
        ("frozen", "frozen= takes whole parameters"),
        ("split", "split= is found out by trials"),
        ("no budgets", "processes of this machine share its memory: pass memory="),
        ("given", "p.grad of 'embed.weight', a DTensor, cannot be set"),
        ("largest", "only the 2-norm of all elements is that of the whole"),
    ],
)
def test_what_shards_cannot_have_is_refused(ranks: Ranks, what: str, words: str) -> None:
    found = ranks.run("rank_shards.odd", 2, what=what)
    assert any(re.search(words, said) for said in found), found
    if what != "empty":  # the other process has all of that one
        assert all(re.search(words, said) for said in found), found
