"""The budgets that strata would choose on this machine, the largest model that would train in them,
and what would make it larger or faster, for `strata doctor`.

    found = largest(room, machine, options)    # of a ladder of Llamas; None: not even the smallest
    found.parameters, found.forecast.step_seconds
    found.refusal                              # why the next larger one does not fit

The arithmetic is that of `strata estimate`: a model is built on shapes, and its step planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ... import _core
from ..._config import device, machine
from ..._config.budgets import DISK_SHARE, UNBOUNDED, shares
from ..._config.choices import AS_IS, MODEL_SIZES
from ..._config.configure import default_workers
from ..._config.device import compute_threads
from ..._config.options import FREE_SHARE, Options
from ..._config.sizes import format_size
from ..._planning.budget_check import MEMORY_KINDS
from ..._planning.forecast import Forecast
from ..._planning.limits import GAIN_MIN, Limit, Setting, limits
from ..._profiling.calibrate import TYPICAL, Calibration, calibration
from ..estimate import Step, quiet, rehearse
from ..models import llama_config
from ..options import wishes_of
from ..planner import setup_of
from .facts import PAGE_BYTES

if TYPE_CHECKING:
    from ..._core import Costs, DtypeName

VOCABULARY = 32_000


def parameter_count(shape: tuple[int, int, int, int]) -> int:
    """Of a Llama of this shape, with an embedding and a head."""
    hidden, layers, _, intermediate = shape
    block = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    return layers * block + (2 * VOCABULARY + 1) * hidden


# Hidden size, layers, heads, intermediate size: those with a name, and others like them.
SHAPES = tuple(
    sorted(
        (
            *MODEL_SIZES.values(),
            (512, 14, 8, 1408),
            (1024, 12, 16, 2816),
            (1280, 24, 20, 3456),
            (1536, 24, 16, 4096),
            (2048, 28, 16, 5632),
            (2560, 26, 20, 6912),
            (3072, 28, 24, 8192),
            (3584, 32, 28, 9728),
            (4096, 32, 32, 11008),
            (4608, 36, 36, 12288),
            (5120, 40, 40, 13824),
            (6144, 44, 48, 16384),
            (6656, 60, 52, 17920),
            (8192, 64, 64, 22016),
            (9216, 72, 72, 24576),
            (10240, 80, 80, 27648),
            (12288, 96, 96, 32768),
        ),
        key=parameter_count,
    )
)


@dataclass(frozen=True)
class Way:
    """What of a model trains, and how the rest of it lies."""

    lora: str | None
    frozen: str
    rest_bytes_min: float  # of a parameter that nothing can do without


# 16 bits, residual and two moments.
WHOLE = Way(None, AS_IS, 12)
# 4 bits, and a scale for 64 of them.
ADAPTERS = Way("r=8", "nf4", 0.5625)


@dataclass(frozen=True)
class Largest:
    """The largest model of the ladder that trains."""

    shape: tuple[int, int, int, int]
    forecast: Forecast
    refusal: str  # of the next larger one; "" where there is none

    @property
    def parameters(self) -> int:
        """How many it has."""
        return parameter_count(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        names = ("hidden", "layers", "heads", "intermediate")
        found = self.forecast.to_dict()
        return {
            "parameters": self.parameters,
            **dict(zip(names, self.shape, strict=True)),
            "step_seconds": found["step_seconds"],
            "tokens_per_second": found["tokens_per_second"],
            "ssd_bytes_per_step": self.forecast.written_bytes,
            "limited": found["limited"],
            "next_refusal": self.refusal,
        }


def budgets(device_name: str, paths: Sequence[str]) -> dict[str, int]:
    """What strata.wrap() takes of its own accord for a model that needs more than there is. Folders
    in memory are no SSD."""
    free = int(machine.free_host_bytes() * FREE_SHARE)
    chosen = shares({}, UNBOUNDED, UNBOUNDED, free, device.free_bytes(device_name))
    drives = [path for path in paths if machine.file_system(path).kind not in MEMORY_KINDS]
    return {**chosen, "ssd": int(machine.free_disk_bytes(drives) * DISK_SHARE)}


def calibrated(options: argparse.Namespace, device_name: str, paths: Sequence[str]) -> Calibration:
    """This machine's speeds, as remembered or measured now (about three seconds)."""
    here = argparse.Namespace(**{**vars(options), "device": device_name, "ssd_path": list(paths)})
    return calibration(setup_of(here, PAGE_BYTES, options.dtype))


def with_typical_disk(found: Calibration) -> Calibration:
    """The same machine with a modest SSD."""
    speeds = {"read_bytes_s": TYPICAL["read"], "write_bytes_s": TYPICAL["write"]}
    return replace(found, costs=found.costs.replace(**speeds))


def largest(
    room: dict[str, int],
    found: Calibration,
    options: argparse.Namespace,
    device_name: str,
    way: Way = WHOLE,
) -> Largest | None:
    """The largest model of SHAPES whose step fits. None where none does. Raises ImportError where
    adapters are asked for and PEFT is not installed."""
    refusal = ""
    rest = sum(room.values())
    for shape in reversed(SHAPES):
        needed = int(parameter_count(shape) * way.rest_bytes_min)
        if needed > rest:
            refusal = (
                f"{format_size(needed)} at least for parameters and states, and the budgets are "
                f"{format_size(rest)} together"
            )
            continue
        forecast = _planned(shape, room, found, options, device_name, way)
        if forecast.feasible:
            return Largest(shape, forecast, refusal)
        refusal = forecast.refusal.removeprefix("infeasible: ")
    return None


def _planned(
    shape: tuple[int, int, int, int],
    room: dict[str, int],
    found: Calibration,
    options: argparse.Namespace,
    device_name: str,
    way: Way,
) -> Forecast:
    config = llama_config(shape, VOCABULARY, options.sequence)
    dtype: DtypeName = options.dtype
    wrapped_with = Options(dtype=getattr(torch, dtype), workers=1, frozen=way.frozen)
    step = Step(
        config, options.batch, options.sequence, room, device_name, wrapped_with, lora=way.lora
    )
    with quiet("transformers"):
        return rehearse(step, wishes_of("auto", None), found)


def slow_parts(
    found: Largest, costs: Costs, options: argparse.Namespace, device_name: str
) -> list[Limit]:
    """What limits its step, by what twice the speed would save; the most first."""
    workers = options.workers or default_workers(device_name)
    forecast = found.forecast
    paper = _core.PaperPlan(forecast.trace, costs, forecast.budgets, wishes_of("auto", None))
    spare = machine.processors() - workers - compute_threads(device_name)
    setting = Setting(forecast.budgets.ssd_bytes > 0, state="float32", spare_processors=spare)
    return [limit for limit in limits(paper, costs, setting) if limit.saves >= GAIN_MIN]
