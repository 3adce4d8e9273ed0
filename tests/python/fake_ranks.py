"""What fake_core's session says of other ranks, and of workers: it is alone."""

from typing import Any


class Alone:
    """A session of a process that trains by itself."""

    params: list[Any]

    def leave_ranks(self, gives_up: bool) -> None:
        """Nobody waits for it."""

    def end_load(self) -> None:
        """It asks nobody for pages, ever."""

    def updates_first(self) -> bool:
        """Nobody shares its processors."""
        return False

    def owners(self, param: int, rank: int) -> list[tuple[int, int, int]]:
        """It has everything."""
        numel = self.params[param].spec["numel"]
        return [(0, 0, numel)] if numel else []
