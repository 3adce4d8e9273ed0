"""Elements of a snapshot are read in slices."""

import random
from typing import Any, NoReturn

import pytest
import torch
from strata._storage.snapshot_elements import SLICE_ELEMENTS, Elements, Form, slices

ROLES = ("param", "residual", "exp_avg", "exp_avg_sq")


def chunk(**pages: int) -> dict[str, Any]:
    """By role, the elements of a page."""
    return {role: [pages[role], 0, []] if role in pages else None for role in ROLES}


def test_a_slice_lies_in_one_page_of_every_role_and_fits_the_cache() -> None:
    random.seed(1)
    for _ in range(300):
        sizes = [64 * random.randrange(1, 4096) for _ in range(2)]
        sizes = [max(sizes), max(sizes) // min(sizes) * min(sizes)]
        held = chunk(param=2 * sizes[1], exp_avg=sizes[1])
        at, count = 64 * random.randrange(1000), random.randrange(1, 1 << 20)
        end = at
        for begin, size in slices(held, at, count):
            assert begin == end
            assert 0 < size <= SLICE_ELEMENTS
            assert begin == at or begin % 64 == 0
            assert begin // sizes[1] == (begin + size - 1) // sizes[1]
            end = begin + size
        assert end == at + count


def fail(why: str) -> NoReturn:
    raise ValueError(why)


def test_float32_is_not_copied() -> None:
    page = torch.arange(64, dtype=torch.float32).view(torch.uint8)
    held = chunk(param=64, exp_avg=64) | {"param": [64, 0, [[7, 1, 1]]]}
    held["exp_avg"] = [64, 0, [[7, 1, 1], None]]
    elements = Elements("float32", lambda first, count: fail("no scales"), fail)
    pages = {7: page}.__getitem__
    for number in (0, 1):
        values = elements.read(held, pages, number, Form("float32", "adamw"), 8, 16)
        assert values.tolist() == list(range(8, 24))
        assert values.data_ptr() == page.data_ptr() + 32
    assert not elements.read(held, pages, 1, Form("float32", "adamw"), 64, 8).any(), "nobody wrote"
    assert not elements.read(held, pages, 2, Form("float32", "sgd"), 8, 8).any(), "no such moment"
    held["param"] = [64, 128, [[7, 1, 1]]]
    with pytest.raises(ValueError, match="beyond its page"):
        elements.read(held, pages, 0, Form("float32", "adamw"), 40, 16)
