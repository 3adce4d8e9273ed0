"""Elements of a snapshot are read in slices, and its pages a few chunks ahead of them."""

import random
from pathlib import Path
from typing import Any, NoReturn

import pytest
import strata
import torch
from strata._storage.snapshots import source
from strata._storage.snapshots.elements import SLICE_ELEMENTS, Elements, Form, slices
from test_checkpoint import Case, llama
from test_snapshot import HOST, SSD, disk, drive

__all__ = ["disk"]  # a fixture

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
    elements = Elements("float32", fail)
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


@pytest.mark.parametrize("read_bytes", [1, 1 << 18, 1 << 30])
@pytest.mark.parametrize("mode", [{}, {"state_dtype": "8bit", "dtype": torch.bfloat16}])
def test_reads_are_as_large_as_asked_for_and_use_little_memory(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, mode: Any
) -> None:
    made: list[int] = []
    memory = source.page_memory

    def noted(size: int) -> torch.Tensor:
        made.append(size)
        return memory(size)

    case = Case(disk, SSD, llama(), page_size="64KiB", **mode)
    case.train(2)
    strata.snapshot(case.model, tmp_path / "run").wait()
    after = case.train(2)
    case.close()
    monkeypatch.setattr(source, "READ_BYTES", read_bytes)
    monkeypatch.setattr(source, "page_memory", noted)
    again = Case(drive(tmp_path, "other"), HOST, llama(), page_size="128KiB", **mode)
    strata.load(again.model, tmp_path / "run")
    assert again.train(2) == after
    again.close()
    growing = sorted(size for size in made if size > 64 << 10)  # others are of scales
    assert growing or read_bytes == 1
    if read_bytes == 1 << 18:
        assert len(growing) <= 3 * 2, "memory is used again"
        assert max(growing) < read_bytes + (1 << 19)
