"""What strata tells people: where things go (plan) and where time and bytes went (report).

A report is kept as a file: one JSON object, {"format": FORMAT} and the fields of Report by name.
`strata report` renders it.

    report = strata.report(model)
    print(report)
    report.save("report.json")
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from .. import _core
from .._config.choices import HOST
from .._config.machine import processor_name, processors
from .._config.paths import AnyPath, as_path
from .._config.sizes import format_size
from .._profiling import timeline
from .._profiling.timeline import StepRecord
from .._profiling.windows import Judged
from .._schema import Form, FormError, parsed
from .._storage.replacing import write_text
from . import report_text

if TYPE_CHECKING:
    from .._core import Config, Plan, PlannedUnit, Simulation, StepPlan, Trace
    from .._planning.planning import Planning
    from .._runtime.wrapped import Wrapped

FORMAT = "strata report 2"
DAY_SECONDS = 86_400
TB = 1e12  # as makers of drives count their endurance


@dataclass(frozen=True)
class PlanReport:
    """What strata.plan() returns: what would go where. str() gives a table."""

    plan: Plan
    budgets: dict[str, int]
    ranks: int = 1  # that train together

    @property
    def partition(self) -> str:
        """How the units are shared out among the ranks, in a sentence, as if there were no
        activations, of which only a step tells; empty where there is one rank."""
        sizes = sorted(unit["param_bytes"] for unit in self.plan["units"])
        device = self.budgets["device"]
        room = device if sum(sizes) <= device else device - self.plan["nested_bytes"]
        whole = sum(size <= room for size in itertools.accumulate(sizes))
        return report_text.partition_text(self.ranks, whole, len(sizes))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "partition": self.partition}

    def __str__(self) -> str:
        """A table for people."""
        return report_text.plan_text(self)


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier: the budget, what is in use now, and the most that ever was."""

    budget: int
    used: int
    peak: int


@dataclass(frozen=True)
class PlannedPeak:
    """The most that a tier holds under the plan, and at which use of a unit."""

    bytes: int
    budget: int
    where: str  # "backward of layers.7"


@dataclass(frozen=True)
class PlannedRow:
    """What the plan says of one unit."""

    unit: str
    activation: str  # such as "recompute"
    slices: int
    params: str  # where they rest: "host", "ssd", "mixed", or "none" where there are none
    grads: str
    states: str
    resident: bool  # its parameters never leave the device


@dataclass(frozen=True)
class Lag:
    """How the updates of a unit lagged behind the computation, under LockFree."""

    unit: str
    forwards: list[int]  # [k]: forwards that saw parameters k steps old
    merged: int  # gradients that were added to those of an earlier step
    waits: int  # forwards that waited, for the parameters would have been too old


@dataclass(frozen=True)
class Wear:
    """What training at this rate does to the SSD."""

    tb_per_day: float
    days_per_100_tb: float

    @staticmethod
    def of(bytes_per_step: float, seconds_per_step: float) -> Wear | None:
        """None where nothing is written."""
        if bytes_per_step <= 0 or seconds_per_step <= 0:
            return None
        per_day = bytes_per_step / seconds_per_step * DAY_SECONDS / TB
        return Wear(per_day, 100 / per_day)


@dataclass(frozen=True)
class Report:
    """What strata.report() returns. str() gives tables.

    What is counted is counted since wrap(); what is "per step" is the mean of the steps in
    `records`, those that ran under one plan. How long a step takes is measured over `judged`,
    windows of seconds. Without a plan, its fields are None or empty.
    """

    steps: int
    steps_nonfinite: int  #: gradients held infinities or NaN ...
    steps_skipped: int  #: ... and nothing was updated (skip_nonfinite=True)
    grad_norm: float | None  #: of the last step, before clipping
    tiers: dict[str, TierUse]
    link_bytes: dict[str, int]  #: moved, by "<from> to <to>"
    waited_seconds: dict[str, float]  #: for pages, by unit
    page_bytes: int
    io_engine: str  #: "" where nothing is on the SSD
    backend: str
    stats: dict[str, Any]  #: all counters of the core
    measured_seconds: float | None = None  #: of a step, the median
    predicted_seconds: float | None = None
    bound_seconds: float | None = None  #: no plan could be faster
    bound_what: str = ""  #: what the bound comes from
    percent_of_bound: float | None = None  #: 100: as fast as any plan could be; never more
    judged: Judged | None = None  #: what that, and measured_seconds, come from
    limited: str = ""  #: what limits a step, and what would help, in a sentence
    model: str = ""  #: its class, and how large it is
    command: str = ""  #: that trained it
    machine: str = ""
    stalls: dict[str, dict[str, float]] = field(default_factory=dict)  #: by cause, unit: per step
    link_bytes_per_step: dict[str, float] = field(default_factory=dict)
    ssd_written_per_step: float | None = None
    wear: Wear | None = None  #: None: nothing is written
    peaks: dict[str, PlannedPeak] = field(default_factory=dict)  #: by tier
    planned: list[PlannedRow] = field(default_factory=list)
    ranks: int = 1  #: that train together
    lags: list[Lag] = field(default_factory=list)  #: by unit; empty where no update may lag
    plan: StepPlan | None = None
    trace: Trace | None = None  #: what the plan was made from
    simulation: Simulation | None = None  #: the step as the plan predicts it
    records: list[StepRecord] = field(default_factory=list)  #: oldest first

    @property
    def partition(self) -> str:
        """How the plan shares out the units among the ranks, in a sentence; empty where there is
        one rank, or no plan yet."""
        resident = self.plan.resident if self.plan else []
        return report_text.partition_text(self.ranks, sum(resident), len(resident))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        plain = asdict(replace(self, plan=None, trace=None, simulation=None))
        for name in ("plan", "trace", "simulation"):
            struct = getattr(self, name)
            plain[name] = struct and struct.to_dict()
        return plain

    def save(self, path: AnyPath) -> None:
        """Writes it as JSON, for `strata report`."""
        write_text(as_path(path), json.dumps({"format": FORMAT, **self.to_dict()}))

    @staticmethod
    def load(path: AnyPath) -> Report:
        """What save() wrote. Raises ValueError for any other file."""
        file = as_path(path)
        try:
            values = parsed(file.read_bytes())
        except FormError as error:
            raise ValueError(f"{file} is no report: {error}") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(f"{file} is no report of this version of strata")
        try:
            report = _form().read(values)
            str(report)  # numbers that are none cannot be shown
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is a damaged report: {error!s:.200}") from error
        return report

    def __str__(self) -> str:
        """Tables for people."""
        return report_text.report_text(self)


@functools.cache
def _form() -> Form[Report]:
    structs = {each.__name__: each for each in (_core.StepPlan, _core.Trace, _core.Simulation)}
    return Form(Report, structs | {"TimelineSpan": Span})


class Span(TypedDict):
    """A TimelineSpan of the core, in a file."""

    track: str
    cause: str
    lane: int
    backward: bool
    unit: int
    begin_ns: int
    end_ns: int
    bytes: int


def make_report(state: Wrapped) -> Report:
    """The report of a wrapped model, now."""

    stats = state.session.stats()
    config = state.config
    planning: Planning | None = state.planning
    host = stats["host_bytes"]
    return Report(
        steps=state.steps.count,
        steps_nonfinite=state.steps.nonfinite,
        steps_skipped=state.steps.skipped,
        grad_norm=state.steps.last["norm"] if state.steps.last else None,
        tiers={
            "device": TierUse(
                config["device_bytes"], stats["device_bytes"], stats["device_bytes_peak"]
            ),
            # Frames of these two are claimed once and for all.
            "host": TierUse(config["host_bytes"], host, host),
            "ssd": TierUse(config["ssd_bytes"], stats["ssd_bytes"], stats["ssd_bytes"]),
        },
        link_bytes={k.removesuffix(" bytes"): v for k, v in stats.items() if k.endswith(" bytes")},
        waited_seconds=dict(zip(config["units"], stats["waited_s"], strict=True)),
        page_bytes=state.session.plan["page_bytes"],
        io_engine=stats["io_engine"],
        backend=stats["backend"],
        stats=stats,
        ranks=config["ranks"]["count"] if "ranks" in config else 1,
        lags=_lags(config, stats) if config["update"] == "lock_free" else [],
        model=_about_model(state),
        command=_about_command(),
        machine=_about_machine(stats),
        **{
            **_measured(timeline.steady(state.log.records)),
            **(_planned(planning) if planning else {}),
        },
    )


def _lags(config: Config, stats: dict[str, Any]) -> list[Lag]:
    counts = (stats["staleness"], stats["merged gradients"], stats["update waits"])
    return [Lag(*row) for row in zip(config["units"], *counts, strict=True)]


def _measured(records: list[StepRecord]) -> dict[str, Any]:
    """The fields of a report that come from what was recorded."""
    if not records:
        return {}
    seconds = timeline.measured_seconds(records)
    links = timeline.link_bytes(records)
    written = links["host to ssd"]
    return {
        "measured_seconds": seconds,
        "stalls": timeline.stall_seconds(records),
        "link_bytes_per_step": links,
        "ssd_written_per_step": written,
        "wear": Wear.of(written, seconds or 0.0),
        "records": records,
    }


def _planned(planning: Planning) -> dict[str, Any]:
    """The fields of a report that come from the plan."""
    plan = planning.plan
    if plan is None:
        return {}
    trace, simulation, bound = planning.trace, planning.simulation, planning.bound
    judged = planning.judged
    speed: dict[str, Any] = {}
    if judged is not None and bound is not None and judged.step_seconds > 0:
        percent = 100 * bound.seconds / judged.step_seconds
        speed = {
            "judged": judged,
            "measured_seconds": judged.step_seconds,
            "percent_of_bound": percent,
        }
    return {
        **speed,
        "plan": plan,
        "trace": trace,
        "simulation": simulation,
        "predicted_seconds": simulation.step_seconds if simulation else None,
        "bound_seconds": bound.seconds if bound else None,
        "bound_what": bound.what if bound else "",
        "limited": planning.limited,
        "peaks": planned_peaks(plan, trace),
        "planned": planned_rows(plan, trace) if trace else [],
    }


def planned_peaks(plan: StepPlan, trace: Trace | None) -> dict[str, PlannedPeak]:
    """The peak of every tier, with the name of the moment."""
    peaks: dict[str, PlannedPeak] = {}
    for tier, peak in plan.peaks.items():
        where = ""
        if trace and peak.use < len(trace.uses):
            use = trace.uses[peak.use]
            way = "backward" if use.backward else "forward"
            where = f"{way} of {trace.units[use.unit].name}"
        peaks[tier] = PlannedPeak(peak.bytes, peak.budget, where)
    return peaks


def planned_rows(plan: StepPlan, trace: Trace) -> list[PlannedRow]:
    """The plan as a table, in the order of the units."""
    return [
        PlannedRow(
            unit.name,
            planned.activation,
            planned.slices,
            _resting(planned, planned.param_ssd_bytes, unit.param_bytes, unit.remote_param_bytes),
            _resting(planned, planned.grad_ssd_bytes, unit.grad_bytes, unit.remote_grad_bytes),
            _resting(planned, planned.state_ssd_bytes, unit.state_bytes, unit.remote_state_bytes),
            resident,
        )
        for unit, planned, resident in zip(trace.units, plan.units, plan.resident, strict=True)
    ]


def _resting(planned: PlannedUnit, on_ssd: int, size: int, remote: int) -> str:
    if size == remote:
        return "remote" if remote else "none"
    if planned.on_device:
        return "device"
    return "host" if on_ssd == 0 else "ssd" if on_ssd >= size - remote else "mixed"


def _about_model(state: Wrapped) -> str:
    """Its class, and how large it is."""
    count = sum(spec["numel"] for spec in state.config["params"])
    size = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    return f"{type(state.model).__name__}, {size} parameters"


def _about_command() -> str:
    """What this process was started as; empty: by no command."""
    program, *arguments = sys.argv or [""]
    name = Path(program).name
    if name == "__main__.py":  # python -m PACKAGE
        name = Path(program).parent.name
    return shlex.join([name, *arguments]) if name else ""


def _about_machine(stats: dict[str, Any]) -> str:
    """Processor, memory, and the device where it is another. `stats`: of the session."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [processor_name(), f"{processors()} processors", f"{format_size(memory)} of memory"]
    if (device := stats.get("device", HOST)) != HOST:
        parts.append(device)
    return ", ".join(parts)
