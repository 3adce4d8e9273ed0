"""What `strata finetune` knows of a run before it reads any text: whether the step fits into the
device budget, and what the run writes to the SSD.

    for sentence in check(choice, options, "host"):
        print(sentence)

The step is counted on shapes (estimate.py). A model that cannot run on shapes alone is left to
strata.wrap(), which knows after the first step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from .._config import machine
from .._config.configure import DISK_SHARE, FREE_SHARE, UNBOUNDED
from .._config.sizes import format_size, parse_budgets, parse_size, write_size
from .._config.update_modes import parse_update
from .._errors import StrataError
from .._planning import budget_check
from .._report.endurance import wear_lines
from .._storage.leftovers import remove_leftovers
from .estimate import Step, rehearse
from .planner_options import wishes_of

if TYPE_CHECKING:
    from .._core import DtypeName
    from .._runtime.wrapped import Wrapped
    from .finetune_model import Choice
    from .finetune_options import Options

SURE_SHARE = 0.9  # of what is counted: a budget below that is too small however counting errs

log = logging.getLogger("strata")


def wear_when_timed(state: Wrapped, options: Options, told: bool) -> list[str] | None:
    """What a run writes, as soon as there is a plan that says how long a step takes: sentences for
    people, with bytes a day. None: there is no plan yet. `told`: check() has said what the whole
    run writes.
    """
    simulation = state.planning.simulation if state.planning else None
    if simulation is None or not options.ssd_endurance:
        return None
    return wear_lines(
        simulation["lanes"]["write"]["bytes"],
        parse_size(options.ssd_endurance),
        None if told else options.steps,
        simulation["step_seconds"],
    )


def check(choice: Choice, options: Options, device: str) -> list[str]:
    """Sentences for people. `device`: the core's name of it.

    Raises StrataError for budgets larger than the machine, and for a device budget that the step
    does not fit into, with the numbers.
    """
    remove_leftovers(options.ssd_path or [])
    given = parse_budgets(options.memory())
    budget_check.check(given, device, options.ssd_path or [])
    budgets = {
        "device": UNBOUNDED,
        "host": int(machine.free_host_bytes() * FREE_SHARE),
        "ssd": int(machine.free_disk_bytes(options.ssd_path or []) * DISK_SHARE),
        **given,
    }
    update = parse_update(options.update)
    step = Step(
        choice.config,
        options.batch,
        options.sequence,
        cast("DtypeName", options.dtype),
        budgets,
        device,
        update,
        options.state_dtype,
        0 if options.page_size == "auto" else parse_size(options.page_size),
        accumulate=options.accumulation > 1,
        max_unit_norm=options.updates().get("max_unit_norm"),
    )
    try:
        found = rehearse(step, wishes_of(options.activations, options.split))
    except ValueError as error:
        log.debug("nothing is known before the first step: %s", error)
        return []
    least = found.plan["device_bytes_min"]
    if SURE_SHARE * least > budgets["device"]:
        raise StrataError(
            f"infeasible: the device budget is {format_size(budgets['device'])}, and a step of "
            f"{options.batch} by {options.sequence} tokens needs about {format_size(least)}: "
            f"--device-memory {write_size(least)} would do, or a smaller --batch or --sequence"
        )
    endurance = parse_size(options.ssd_endurance) if options.ssd_endurance else None
    return wear_lines(found.written_bytes, endurance, options.steps)
