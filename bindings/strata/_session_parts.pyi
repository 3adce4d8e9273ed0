"""What a session is given beside its Config, as engine/session_parts.hpp has it. For type checkers
only: import these from _core.
"""

from collections.abc import Callable
from typing import Protocol

Rule = Callable[[int, int, int, int, int, int, int, int], None]
"""Updates a slice: options, parameter, step (from 1), count, and addresses of so many float32
values: parameter, gradient, moment1 and moment2 (0: absent)."""

class Arrival(Protocol):
    """wait() returns when all of it is there, and raises as send() does. Behind drop() nothing is
    written to its places any more."""

    def wait(self, patience: float) -> None: ...
    def drop(self) -> None: ...

class Wire(Protocol):
    """Each place is an address and a size. send() raises where the other rank is gone, or takes
    nothing for so many seconds. expect() returns at once."""

    def send(self, to: int, places: list[tuple[int, int]], patience: float) -> None: ...
    def expect(self, source: int, places: list[tuple[int, int]]) -> Arrival: ...
