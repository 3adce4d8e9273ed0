"""What `strata finetune` knows of a run before it reads any text: whether the step fits into the
device budget, and what the run writes to the SSD.

    wear = check(choice, options, "host")
    print(*wear.counted())

The step is counted on shapes (estimate.py). A model that cannot run on shapes alone is left to
strata.wrap(), which knows after the first step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..._config import machine
from ..._config.budgets import DISK_SHARE, UNBOUNDED
from ..._config.choices import HOST
from ..._config.options import FREE_SHARE
from ..._config.options import Options as WrapOptions
from ..._config.sizes import format_size, parse_budgets, parse_size, write_size
from ..._errors import StrataError
from ..._planning import budget_check
from ..._report.report_text import wear_lines
from ..._storage.ssd_folders import remove_leftovers
from ..estimate import Step, rehearse
from ..options import wishes_of

if TYPE_CHECKING:
    from ..._config.ranks import Ranks
    from ..._runtime.wrapped import Wrapped
    from ..models import Choice
    from .options import Options

SURE_SHARE = 0.9  # of what is counted: a budget below that is too small however counting errs

log = logging.getLogger("strata")


@dataclass
class Wear:
    """What a run writes to the SSD, for people: told when a step has been counted, and again, with
    bytes a day, when a plan says how long one takes."""

    steps: int
    endurance_bytes: int | None
    bytes_per_step: int = 0  # as counted; 0: none, or not known
    _timed: bool = False

    def counted(self) -> list[str]:
        """Sentences; none where nothing is known to be written."""
        return wear_lines(self.bytes_per_step, self.endurance_bytes, self.steps)

    def timed(self, state: Wrapped) -> list[str]:
        """Sentences, once; none as long as there is no plan."""
        simulation = state.planning.simulation if state.planning else None
        if self._timed or simulation is None or not self.endurance_bytes:
            return []
        self._timed = True
        here = state.ranks.count if state.ranks is not None else 1
        return wear_lines(
            here * simulation.lanes["write"].bytes,
            self.endurance_bytes,
            None if self.bytes_per_step else self.steps,
            simulation.step_seconds,
        )


def check(choice: Choice, options: Options, device: str, ranks: Ranks | None = None) -> Wear:
    """Returns what the run writes. `device`: the core's name of it.

    Raises StrataError for budgets larger than the machine, and for a device budget that the step
    does not fit into, with the numbers.
    """
    start, memory, training = options.start, options.memory, options.training
    endurance = parse_size(memory.ssd_endurance) if memory.ssd_endurance else None
    wear = Wear(training.steps, endurance)
    remove_leftovers(memory.ssd_path)
    given = parse_budgets(memory.budgets())
    here = ranks.count if ranks is not None else 1
    asked = {**given, "device": here * given.get("device", 0)} if device == HOST else given
    budget_check.check(asked, device, memory.ssd_path)
    budgets = {
        "device": UNBOUNDED,
        "host": int(machine.free_host_bytes() * FREE_SHARE),
        "ssd": int(machine.free_disk_bytes(memory.ssd_path) * DISK_SHARE),
        **given,
    }
    wrapped_with = WrapOptions(
        dtype=getattr(torch, memory.dtype),
        page_size=memory.page_size,
        workers=1,
        frozen=memory.frozen,
        snapshots=1 if options.results.snapshot_every else 0,
        ranks=replace(ranks, rank=0) if ranks is not None else None,
        **options.updates(),
    )
    step = Step(
        choice.config, training.batch, start.sequence, budgets, device, wrapped_with, start.lora
    )
    try:
        found = rehearse(step, wishes_of(memory.activations, memory.split))
    except ValueError as error:
        log.debug("nothing is known before the first step: %s", error)
        return wear
    least = found.plan.device_bytes_min
    if SURE_SHARE * least > budgets["device"]:
        raise StrataError(
            f"infeasible: the device budget is {format_size(budgets['device'])}, and a step of "
            f"{training.batch} by {start.sequence} tokens needs about {format_size(least)}: "
            f"--device-memory {write_size(least)} would do, or a smaller --batch or --sequence"
        )
    wear.bytes_per_step = here * found.written_bytes
    return wear
