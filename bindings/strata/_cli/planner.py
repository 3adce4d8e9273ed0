"""`strata plan`, a recorded step on another machine, on paper; and what `strata estimate` shares
with it: the machine that they plan for, and the answer. That is a forecast, and what follows for a
whole run, the SSD's life and budgets on this machine.

    strata plan --trace step.trace.json --memory device=8GiB,host=24GiB,ssd=200GiB \\
        --ssd-read-speed 12GB/s --ssd-write-speed 8GB/s --tokens-scale 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import _core
from .._config import configure, device
from .._config.budgets import UNBOUNDED
from .._config.choices import HOST, SPEED_OF
from .._config.sizes import format_count, format_duration, format_size, write_size
from .._planning import budget_check
from .._planning.forecast import Forecast, forecast
from .._profiling.calibrate import Calibration, Setup, calibration
from .._report.report_text import wear_lines
from .._storage.ssd_folders import remove_leftovers
from .._storage.trace_file import load
from .options import SPEEDS, budgets_of, wishes_of
from .sharing import costs_of_rank, share_of, shared_among

if TYPE_CHECKING:
    from .._core import Budgets, Costs, DtypeName, Trace, Wishes


@dataclass(frozen=True)
class Answer:
    """A forecast among its circumstances."""

    forecast: Forecast
    steps: int | None = None  # of the whole run
    endurance_bytes: int | None = None  # of the drives
    ssd_bytes_enough: int = 0  # what would do, where there is no SSD and host memory is too small
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return self.forecast.to_dict() | {
            "ssd_bytes_per_step": self._written_bytes(),
            "ssd_bytes_enough": self.ssd_bytes_enough,
            "wear": self._wear(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """For people."""
        return "\n\n".join(filter(None, [str(self.forecast), "\n".join(self._sentences())]))

    def _sentences(self) -> list[str]:
        found = self._wear()
        seconds = self.forecast.step_seconds
        if seconds and self.steps:
            takes = "take" if self.steps > 1 else "takes"
            steps = format_count(self.steps, "step")
            found.insert(0, f"{steps} {takes} {format_duration(self.steps * seconds)}")
        if self.ssd_bytes_enough:
            found.append(f"give it an SSD: ssd={write_size(self.ssd_bytes_enough)} would do")
        return [*found, *self.notes]

    def _written_bytes(self) -> int:
        """To the SSD in a step, by all ranks."""
        return self.forecast.ranks * self.forecast.written_bytes

    def _wear(self) -> list[str]:
        seconds = self.forecast.step_seconds
        if not seconds:
            return []
        return wear_lines(self._written_bytes(), self.endurance_bytes, self.steps, seconds)


def reply(
    options: argparse.Namespace,
    trace: Trace,
    costs: Costs,
    budgets: Budgets,
    tokens: int,
    changes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Answer:
    """Plans. `options`: of add_machine(); `budgets` and `tokens`: of one rank; `changes`: to the
    model, so that it trains at all."""
    wishes, ranks = wishes_of(options.activations, options.split), options.ranks
    told = [SPEED_OF[lane] for option, lane in SPEEDS.items() if getattr(options, option)]
    costs = costs_of_rank(costs, ranks, options.device, told)
    found = forecast(trace, costs, budgets, wishes, ranks * tokens)
    found = replace(found, changes=changes, ranks=ranks)
    enough = 0 if found.feasible else ranks * _ssd_enough(trace, costs, budgets, wishes)
    return Answer(found, options.steps, options.ssd_endurance, enough, [*notes, *remarks(options)])


def show(answer: Answer, as_json: bool) -> int:
    """Prints it, and returns the command's exit status: 0 where the step fits, 1 where not."""
    print(json.dumps(answer.to_dict(), indent=2) if as_json else answer)
    return 0 if answer.forecast.feasible else 1


def _ssd_enough(trace: Trace, costs: Costs, budgets: Budgets, wishes: Wishes) -> int:
    """Bytes of an SSD with which a step would fit that does not fit without one; 0 where none
    helps."""
    if budgets.ssd_bytes:
        return 0
    with_ssd = _core.paper_budgets(
        budgets.page_bytes, budgets.device_bytes, budgets.host_bytes, UNBOUNDED, budgets.grads_rest
    )
    plan = _core.PaperPlan(trace, costs, with_ssd, wishes).plan
    return plan.peaks["ssd"].bytes if plan.feasible else 0


# Of a GPU, outside of any budget: the CUDA context, loaded kernels and the handles of libraries.
# PyTorch programs see 300 to 600 MiB, by GPU, driver and libraries in use.
CONTEXT_BYTES = 896 << 20


def setup_of(options: argparse.Namespace, page_bytes: int, dtype: DtypeName = "bfloat16") -> Setup:
    """What is measured. REQUIRES: options.device is what device.choose() made of it."""
    remove_leftovers(options.ssd_path)
    workers = options.workers or configure.default_workers(options.device)
    engine = options.io_engine
    return Setup(workers, page_bytes, options.ssd_path, engine, dtype, options.device)


def machine_of(
    options: argparse.Namespace, page_bytes: int, dtype: DtypeName = "bfloat16"
) -> Calibration:
    """This machine with --device, as remembered or measured now, but with the speeds that --*-speed
    gives. REQUIRES: options.device is what device.choose() made of it.

    Raises StrataError where the device cannot be used.
    """
    paths = options.ssd_path
    ssd_given = options.ssd_read_speed is not None and options.ssd_write_speed is not None
    found = calibration(setup_of(options, page_bytes, dtype))
    given = {SPEED_OF[lane]: getattr(options, option) for option, lane in SPEEDS.items()}
    said: dict[str, Any] = {n: float(value) for n, value in given.items() if value is not None}
    if ssd_given and not paths:
        said["slow"] = _with_disk(found.costs.slow)
    return replace(found, costs=found.costs.replace(**said))


def remarks(options: argparse.Namespace) -> list[str]:
    """Notes for people on the budgets and on the folders of --ssd-path, on this machine."""
    memory = dict(options.memory)
    if options.device == HOST:
        memory["device"] *= options.ranks
    said = budget_check.remarks(memory, options.device, options.ssd_path)
    wanted, free = options.memory["device"], device.free_bytes(options.device)
    if free is not None and wanted > free - CONTEXT_BYTES:
        said.append(
            f"device budget of {format_size(wanted)}: {options.device} has {format_size(free)} "
            f"free, of which CUDA's context and kernels take about {format_size(CONTEXT_BYTES)} "
            f"outside of the budget: {format_size(max(0, free - CONTEXT_BYTES))} is safe"
        )
    return said


def _with_disk(slow: Any) -> Any:
    """Adds disks that were not measured. Each way keeps some of its speed beside the other, as with
    most drives."""
    mixed = 0.6
    result = {lane: dict(row) for lane, row in slow.items()}
    result.setdefault("read", {})["write"] = mixed
    result.setdefault("write", {})["read"] = mixed
    return result


def scaled(trace: Trace, factor: float) -> Trace:
    """The step with a batch so many times as large: computation takes so many times as long, and
    what PyTorch holds grows with it. (Gradients do not grow, so somewhat too much is counted.)"""

    def grown(size: int) -> int:
        return round(size * factor)

    return trace.replace(
        uses=[
            use.replace(
                seconds=use.seconds * factor,
                gap_seconds=use.gap_seconds * factor,
                live_bytes=grown(use.live_bytes),
                peak_bytes=grown(use.peak_bytes),
                gap_peak_bytes=grown(use.gap_peak_bytes),
            )
            for use in trace.uses
        ],
        units=[u.replace(slices_max=max(1, int(u.slices_max * factor))) for u in trace.units],
        tensors=[tensor.replace(bytes=grown(tensor.bytes)) for tensor in trace.tensors],
        tail_seconds=trace.tail_seconds * factor,
        tail_peak_bytes=grown(trace.tail_peak_bytes),
    )


def run(options: argparse.Namespace) -> int:
    """0 where the step fits, 1 where it does not. `options`: of options.plan_parser()."""
    found = load(options.trace)
    trace = scaled(found.trace, options.tokens_scale)
    trace = shared_among(trace, options.ranks)
    page_bytes = page_bytes_of(trace)
    options.device = device.choose(options.device)
    costs = machine_of(options, page_bytes).costs
    costs.compute_scale /= options.compute_speed
    if options.device == HOST:  # all ranks compute on the processors
        costs.compute_scale *= options.ranks
    tokens = round(found.origin.tokens * options.tokens_scale)
    budgets = budgets_of(share_of(options.memory, options.ranks), page_bytes)
    answer = reply(options, trace, costs, budgets, tokens)
    return show(answer, options.json)


def page_bytes_of(trace: Trace) -> int:
    """The page size that a trace was recorded with: a chunk is what lies behind one page. Raises
    ValueError where it cannot be told."""
    for unit in trace.units:
        if unit.chunks and unit.param_bytes % unit.chunks == 0:
            return unit.param_bytes // unit.chunks
    raise ValueError("no unit of the trace has chunks: its page size cannot be told")
