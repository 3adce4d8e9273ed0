"""The machine that `strata plan` and `strata estimate` plan for: what options say of it, and for
the rest this one.

machine = machine_of(options, page_bytes, "bfloat16")
machine.costs["read_bytes_s"], machine.flops_s
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, cast

from .._config import configure, device
from .._config.sizes import format_size
from .._planning import budget_check
from .._profiling.calibrate import Calibration, Setup, calibration
from .._storage.leftovers import remove_leftovers
from .planner_options import SPEEDS

if TYPE_CHECKING:
    from .._core import Costs, DtypeName

# Of a GPU, outside of any budget: the CUDA context, loaded kernels and the handles of libraries.
# PyTorch programs see 300 to 600 MiB, by GPU, driver and libraries in use.
CONTEXT_BYTES = 512 << 20


def machine_of(
    options: argparse.Namespace, page_bytes: int, dtype: DtypeName = "bfloat16"
) -> Calibration:
    """What --*-speed says, and for the rest this machine with --device, as remembered or measured
    now. REQUIRES: options.device is what device.choose() made of it.

    Raises ValueError where an SSD is to be used and its speed is neither told nor to be measured,
    and StrataError where the device cannot be used.
    """
    paths = options.ssd_path
    remove_leftovers(paths)
    told = {name: getattr(options, option) for option, name in SPEEDS.items()}
    ssd_told = options.ssd_read_speed is not None and options.ssd_write_speed is not None
    if options.memory["ssd"] and not paths and not ssd_told:
        raise ValueError(
            "an ssd budget needs --ssd-read-speed and --ssd-write-speed, or --ssd-path to measure"
        )
    workers = options.workers or configure.default_workers(options.device)
    setup = Setup(workers, page_bytes, paths, options.io_engine, dtype, options.device)
    found = calibration(setup)
    costs: dict[str, Any] = dict(found.costs)
    costs.update({name: float(value) for name, value in told.items() if value is not None})
    if ssd_told and not paths:
        costs["slow"] = _with_disk(costs["slow"])
    return dataclasses.replace(found, costs=cast("Costs", costs))


def remarks(options: argparse.Namespace) -> list[str]:
    """What there is to say of the budgets on this machine, and of the folders of --ssd-path."""
    said = budget_check.remarks(options.memory, options.device, options.ssd_path)
    asked, free = options.memory["device"], device.free_bytes(options.device)
    if free is not None and asked > free - CONTEXT_BYTES:
        said.append(
            f"device budget of {format_size(asked)}: {options.device} has {format_size(free)} "
            f"free, of which CUDA's context and kernels take about {format_size(CONTEXT_BYTES)} "
            f"outside of the budget: {format_size(max(0, free - CONTEXT_BYTES))} is safe"
        )
    return said


def _with_disk(slow: Any) -> Any:
    """Disks that were not measured: each way keeps some of its speed beside the other, as most
    drives do."""
    mixed = 0.6
    result = {lane: dict(row) for lane, row in slow.items()}
    result.setdefault("read", {})["write"] = mixed
    result.setdefault("write", {})["read"] = mixed
    return result
