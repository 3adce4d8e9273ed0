"""`strata finetune` as one of several processes that torchrun started, one for each rank.

    ranks = meet()                  # None: this process is alone
    path = led(ranks, make)         # rank 0 makes something; what it returns, on all ranks
    lead = Lead(state)              # once the model is wrapped
    lead.any(requested)             # whether any of them says so
    lead.first(finish)              # rank 0 alone does it, and the others wait

Where rank 0 fails in what it does for all, the others raise what says so, and nobody hangs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed

from ..._config.launched import processes_started
from ..._config.ranks import Ranks, naming_lost, ranks_there
from ..._errors import StrataError
from ..._runtime.closing import give_up
from ..._storage.together import Together

if TYPE_CHECKING:
    from ..._runtime.wrapped import Wrapped

WAIT = timedelta(days=30)  # for rank 0, which may read data for hours; a dead one is noticed


def meet() -> Ranks | None:
    """The ranks of this run, which torch.distributed knows from here on. Raises ValueError where
    they are on several machines."""
    if processes_started() > 1 and not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=WAIT)
    found = ranks_there()
    if found is not None and found.machines:
        raise ValueError(
            "strata finetune trains with the ranks of one machine, and these are on "
            f"{', '.join(dict.fromkeys(found.machines))}: start them on one"
        )
    return found


def led(ranks: Ranks | None, do: Callable[[], str | None]) -> str:
    """What `do` returns on rank 0. Raises there what it raises, and on the others StrataError."""
    if ranks is None:
        return do() or ""
    failure: BaseException | None = None
    said: dict[str, str] = {}
    if ranks.rank == 0:
        try:
            said = {"found": do() or ""}
        except BaseException as error:
            failure, said = error, {"error": f"{type(error).__name__}: {error!s:.1000}"}
    with contextlib.ExitStack() as stack:
        if failure is None:
            stack.enter_context(naming_lost(ranks, ", before all had begun"))
        else:
            stack.enter_context(contextlib.suppress(RuntimeError))
        heard = ranks.hear(said)[0]
    if failure is not None:
        raise failure
    if "error" in heard:
        raise StrataError(f"rank 0 failed: {heard['error']}")
    return str(heard["found"])


class Lead:
    """The ranks of a wrapped model; of a process that is alone the one."""

    def __init__(self, state: Wrapped) -> None:
        self._state = state

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes files."""
        return self._together().leads

    def any(self, mine: bool) -> bool:
        """Whether any rank says so. Called by all of them at the same moment of training."""
        if self._state.ranks is None:
            return mine
        with self._together().phase() as phase:
            phase.said = mine
        return any(phase.heard)

    def first(self, do: Callable[[], None]) -> None:
        """Rank 0 does it. All return when it has, or raise where it fails."""
        together = self._together()
        with together.phase():
            if together.leads:
                do()

    def give_up(self) -> None:
        """An exception ends this rank: others need not wait for what it will never do."""
        if self._state.ranks is not None:
            give_up(self._state.session)

    def _together(self) -> Together:
        return Together.of(self._state, "strata finetune", patience_s=math.inf)
