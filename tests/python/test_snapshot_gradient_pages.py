"""Ranks ask alike for pages of gradients, of which one rank reads some for all."""

import random
from typing import Any

import pytest
import torch
from strata._storage.snapshot_files import GRAD
from strata._storage.snapshot_gradient_pages import GradientPages, Owners, Piece
from strata._storage.together import Together

RANKS, PER_PAGE, CHUNKS, FIRST_BYTE = 3, 8, 6, 32
READERS = {0: 2, 1: 0}  # by rank that had pages; what rank 2 had, each reads for itself
PAGE = FIRST_BYTE + 4 * PER_PAGE


class Shelf:
    """Pages as one rank reads them. For bugs by which ranks expect different ones from others."""

    def __init__(self, damaged: int = -1) -> None:
        self.passed_on: list[tuple[int, int, int]] = []
        self._damaged = damaged

    def reader_for(self, users: set[int], rank: int) -> int | None:
        reader = READERS.get(rank)
        return None if users == {reader} else reader

    def page(self, slot: int, rank: int, reader: int | None, together: Together) -> torch.Tensor:
        if reader is not None:
            self.passed_on.append((slot, rank, reader))
        if slot == self._damaged:
            raise OSError(slot)
        page = torch.full((PAGE,), 255, dtype=torch.uint8)
        page[FIRST_BYTE:] = values_of(rank, slot).view(torch.uint8)
        return page


def values_of(rank: int, slot: int) -> torch.Tensor:
    return torch.arange(PER_PAGE, dtype=torch.float32) + 1000 * rank + 10 * slot


def pieces_of(chosen: random.Random) -> list[tuple[Piece, Owners]]:
    """Of parameters of one piece each, with their owners."""
    found = []
    for _ in range(100):
        number, pages = chosen.randrange(CHUNKS), 4
        slots = [[number * pages + i, 0, 0] for i in range(pages)]
        chunk = {"rank": number % RANKS, GRAD: [PER_PAGE, FIRST_BYTE, slots]}
        at = chosen.randrange(pages * PER_PAGE)
        count = chosen.randint(1, pages * PER_PAGE - at)
        cut = chosen.randint(0, count)
        one, other = chosen.sample(range(RANKS), 2)
        found.append((Piece(chunk, [], 0, count, at), [(one, 0, cut), (other, cut, count - cut)]))
    return found


def copied(rank: int, shelf: Shelf, seed: int) -> tuple[GradientPages, list[torch.Tensor]]:
    pages = GradientPages(shelf, Together("a test", rank, RANKS, lambda message: [message]))
    found = []
    for piece, owners in pieces_of(random.Random(seed)):
        found.append(torch.full((piece.count,), -1.0))
        pages.copy(piece, torch.float32, owners, found[-1])
    return pages, found


def expected(rank: int, piece: Piece, owners: Owners) -> torch.Tensor:
    chunk: dict[str, Any] = piece.chunk
    whole = torch.cat([values_of(chunk["rank"], slot) for slot, *_ in chunk[GRAD][2]])
    values = torch.full((piece.count,), -1.0)
    for owner, first, count in owners:
        if owner == rank:
            values[first : first + count] = whole[piece.at + first :][:count]
    return values


@pytest.mark.parametrize("seed", range(5))
def test_ranks_get_what_they_own_and_expect_the_same_pages(seed: int) -> None:
    shelves = [Shelf() for _ in range(RANKS)]
    for rank, shelf in enumerate(shelves):
        pages, found = copied(rank, shelf, seed)
        pages.check()
        for values, (piece, owners) in zip(found, pieces_of(random.Random(seed)), strict=True):
            assert torch.equal(values, expected(rank, piece, owners))
    assert shelves[0].passed_on == shelves[1].passed_on == shelves[2].passed_on
    assert len(shelves[0].passed_on) > 20


def test_a_rank_that_cannot_read_goes_on() -> None:
    sound, broken = Shelf(), Shelf(damaged=0)
    copied(1, sound, 0)[0].check()
    pages, _ = copied(0, broken, 0)
    assert broken.passed_on == sound.passed_on
    with pytest.raises(OSError, match="0"):
        pages.check()
