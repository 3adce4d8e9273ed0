"""What a session is given beside its Config, as engine/session_parts.hpp has it, and what follows
from a Config. For type checkers only: import these from _core.
"""

from collections.abc import Callable
from typing import Protocol

from ._session_config import Config, DtypeName, MomentName

def gradients_rest(config: Config) -> bool:
    """Whether there may be gradients after a step, which a snapshot then has: those that add up
    over several backward() calls, and those that wait for their updates (LockFree)."""

def adds_in_float32(config: Config) -> bool:
    """Whether gradients are float32, whatever their parameters are."""

def element_bytes(dtype: DtypeName, moments: MomentName, sums: bool) -> dict[str, int]:
    """Bytes at rest of an element that is trained: "param", "residual", "exp_avg", "exp_avg_sq",
    "grad". `sums`: gradients add up, in float32."""

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
