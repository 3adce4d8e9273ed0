"""What a session is given beside its Config, as engine/session_parts.hpp has it, and what follows
from a Config. For type checkers only: import these from _core.
"""

from collections.abc import Callable
from typing import Protocol

from ._session_config import Config, DtypeName, MomentName

def adds_in_float32(config: Config) -> bool:
    """Whether gradients are float32, whatever their parameters are."""

def element_bytes(dtype: DtypeName, moments: MomentName, sums: bool) -> dict[str, int]:
    """Bytes at rest of an element that is trained: "param", "residual", "exp_avg", "exp_avg_sq",
    "grad". `sums`: gradients add up, in float32."""

Rule = Callable[[int, int, int, int, int, int, int, int], None]
"""Updates a slice: options, parameter, step (from 1), count, and addresses of so many float32
values: parameter, gradient, moment1 and moment2 (0: absent)."""

class Column(Protocol):
    """Ranks of one number, one on each machine. All make the same calls; each waits, and raises
    where a machine is lost. Addresses are of memory that both may use until it returns."""

    def meet(self) -> None: ...
    def gather(self, mine: int, size: int, everything: int) -> None: ...
    def exchange(self, parts: int, size: int, mine: int) -> None: ...
