"""Ranks that cannot train together: each is told why, soon, and nothing is left. What each does is
in rank_refusals.py; rank_server.py starts them."""

import re

import pytest
from rank_server import Ranks
from test_rank_promises import SOON_S, leaves_nothing  # noqa: F401 (a fixture)

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "models",
            r"parameter '2.0.weight' is float32 \[288, 96\] on rank 0 and missing on rank 1",
        ),
        ("frozen", r"'0.0.weight' is .* on rank 0 and float32 \[288, 96\] frozen on rank 1"),
        ("buffers", r"buffer 'seen' is float32 \[4\] on rank 0 and missing on rank 1"),
        ("sizes of buffers", r"'seen' is float32 \[4\] on rank 0 and float32 \[40\] on rank 1"),
        ("tiles", r"layers in tiles, .*'device'.*, is 0 on rank 0 and [1-9]\d* on rank 1"),
        ("units", r"number of units is \d+ on rank 0 and \d+ on rank 1"),
        ("rules", "the optimizer is adamw on rank 0 and sgd on rank 1"),
        ("dtypes", "dtype is None on rank 0 and torch.bfloat16 on rank 1"),
        ("pages", "page_size is auto on rank 0 and 128.0 KiB on rank 1"),
        ("budgets", r"memory\['host'\].* is 96.0 MiB on rank 0 and 64.0 MiB on rank 1"),
        ("versions", r"version of strata is \S+ on rank 0 and 0.0.0 on rank 1"),
        ("sums", "rank_gradients is mean on rank 0 and sum on rank 1"),
        ("workers", r"workers must be .*-1|refused on rank 1: ValueError: workers must be"),
        (
            "weights",
            r"weights is 1 file, (\d+) bytes, .* on rank 0 and 1 file, \1 bytes, .* rank 1",
        ),
        ("missing", r"no weights at .*of-1"),
        ("no weights", "weights is init on rank 0 and not given on rank 1"),
        ("seeds", "seed is 0 on rank 0 and 1 on rank 1"),
        ("tensor", r"'0.0.weight' is a DTensor with Partial\(sum\).*redistribute"),
    ],
)
def test_what_ranks_cannot_train_together_is_named_by_all(
    ranks: Ranks, what: str, words: str
) -> None:
    first, second = ranks.run("rank_refusals.is_refused", 2, what=what)
    assert first[0] == "ValueError"
    assert second[0] == ("FileNotFoundError" if what == "missing" else "ValueError")
    for _, said, _ in (first, second):
        assert re.search(words, said), said


@pytest.mark.parametrize(
    ("what", "who", "words"),
    [
        ("infeasible", 1, "StrataError: infeasible: .*device|^infeasible: .*device"),
        ("folder", 0, "no room to meet"),
        ("files", 1, "memory|File too large|ulimit -f"),
        ("descriptors", 1, "ulimit -n|open files"),
        ("values", 1, "no room for values"),
        ("values of a file", 1, "no room for values"),
    ],
)
def test_what_one_rank_refuses_by_itself_all_say(
    ranks: Ranks, what: str, who: int, words: str
) -> None:
    """Soon, though its process lives on."""
    found = ranks.run("rank_refusals.is_refused", 2, what=what)
    for rank, (kind, said, seconds) in enumerate(found):
        assert re.search(words, said), said
        assert float(seconds) < SOON_S
        if rank != who:
            assert kind == "ValueError"
            assert f"refused on rank {who}: " in said


def test_machines_with_other_numbers_of_ranks_are_refused(ranks: Ranks) -> None:
    for (said,) in ranks.run("rank_promises.wraps_apart", "aab"):
        words = r"on 2 machines.*\(rank 0 on a, rank 1 on a, rank 2 on b\), and not as many on each"
        assert re.search(words, said), said
    assert not list(ranks.temporary.glob("strata-ranks-*"))


def test_what_the_core_compares_is_named_by_all(ranks: Ranks) -> None:
    """What they were asked for is the same, and what became of it is not."""
    for kind, said, _ in ranks.run("rank_refusals.is_refused", 2, what="core"):
        assert kind == "StrataError"
        assert "cannot train together: one has a model with other parameters" in said


def test_who_fails_once_all_have_met_is_named(ranks: Ranks) -> None:
    """Though its process lives on."""
    (kind, said, seconds), failed = ranks.run("rank_refusals.fails_behind", 2)
    assert failed[:2] == ["OSError", "no room for values"]
    assert kind == "StrataError"
    assert "rank 1" in said
    assert float(seconds) < SOON_S


def test_no_limit_of_open_files_lets_others_wait(ranks: Ranks) -> None:
    first, second = ranks.run("rank_refusals.opens_files", 2)
    assert first == second
    assert int(first[0]) > 5


def test_ranks_of_unlike_device_budgets_have_pages_of_one_size(ranks: Ranks) -> None:
    large, small = "8MiB", "5.4MiB"
    (alone, expected), (other, _) = (
        ranks.run("rank_refusals.has_other_memory", 1, budgets=[device])[0]
        for device in (large, small)
    )
    assert other < alone
    for page, learned in ranks.run("rank_refusals.has_other_memory", 2, budgets=[large, small]):
        assert page <= other
        assert learned == expected
