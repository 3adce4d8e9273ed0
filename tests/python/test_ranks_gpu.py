"""Ranks that compute on GPUs: with --device cuda. What each does is in rank_gpus.py."""

from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from test_ranks import same

pytestmark = pytest.mark.gpu_only

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, clipped": {"dtype": "bfloat16", "max_grad_norm": 0.05},
    "8-bit moments": {"dtype": "bfloat16", "state_dtype": "8bit"},
    "ssd": {
        "dtype": "bfloat16",
        "ssd_path": "own",
        "memory": {"device": "64MiB", "host": "192MiB", "ssd": "2GiB"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_ranks(ranks: Ranks, case: str) -> None:
    expected = same(ranks.run("rank_gpus.bits", 1, **CASES[case]))
    for count in (2, 4):
        assert same(ranks.run("rank_gpus.bits", count, **CASES[case])) == expected


@pytest.mark.parametrize("form", ["nf4-double", "int8"])
def test_nor_where_a_base_rests_as_codes(ranks: Ranks, form: str) -> None:
    expected = same(ranks.run("rank_gpus.bits", 1, frozen=form))
    assert expected != same(ranks.run("rank_gpus.bits", 1, frozen="as-is"))
    for count in (2, 4):
        assert same(ranks.run("rank_gpus.bits", count, frozen=form)) == expected


@pytest.mark.parametrize("update", ["in_backward", "on_step"])
def test_updates_that_begin_in_the_backward_have_the_same_bits(ranks: Ranks, update: str) -> None:
    expected = same(ranks.run("rank_gpus.bits", 4))
    assert same(ranks.run("rank_gpus.bits", 4, update=update)) == expected


def test_a_checkpoint_loads_under_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = same(ranks.run("rank_gpus.bits", 2, saves=path))
    assert same(ranks.run("rank_gpus.bits", 1, steps=0, path=path)) == saved
    expected = same(ranks.run("rank_gpus.bits", 1, steps=2, path=path))
    assert same(ranks.run("rank_gpus.bits", 2, steps=2, path=path)) == expected


def test_who_ends_alone_is_named(ranks: Ranks) -> None:
    stayed, left = ranks.start("rank_gpus.ends_alone", 2).wait()
    assert left.code == -9, left.output
    assert stayed.code == 1, stayed.output
    assert "StrataError: rank 1 has died" in stayed.output
