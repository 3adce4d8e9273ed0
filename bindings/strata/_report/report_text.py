"""Reports and plans as tables of text, and the sentences that other forms of a report share.

print(report_text.report_text(report))
    wear_lines(84e9, endurance_bytes=600 * 10**12, steps=200, step_seconds=60.0)

A drive's endurance (TBW, terabytes written) is on its data sheet; the kernel does not tell it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor, inf, log10
from typing import TYPE_CHECKING

from .._config.choices import in_words
from .._config.sizes import (
    UNITS,
    duration_unit,
    format_count,
    format_duration,
    format_number,
    format_size,
)
from .._profiling.timeline import ALL_UNITS, stall_name

if TYPE_CHECKING:
    from .._core import Bound, PaperPlan, Plan
    from .reports import Lag, PlannedRow, PlanReport, Report

LONG_SECONDS = 3600  # from here on, times are not told in seconds
WAITS_SHOWN = 8  # those that were waited for longest
PLAN_HEAD = ["unit", "activations", "slices", "parameters", "gradients", "state", "resident"]


def plan_text(report: PlanReport) -> str:
    """What would go where."""
    plan = report.plan
    rows = [["tier", "budget", "used"]]
    for tier, budget in report.budgets.items():
        rows.append([tier, format_size(budget), format_size(plan[f"{tier}_bytes"])])  # type: ignore[literal-required]
    units = [["unit", "elements", "bytes", "parameters", "gradients", "state"]]
    for unit in plan["units"]:
        units.append(
            [
                unit["name"],
                f"{unit['params']:,}",
                format_size(unit["param_bytes"]),
                unit["param_tier"],
                unit["grad_tier"],
                unit["state_tier"],
            ]
        )
    return "\n".join(
        [
            f"pages of {format_size(plan['page_bytes'])}; staging "
            f"{format_size(plan['staging_bytes'])} of host memory; smallest device budget "
            f"{format_size(plan['device_bytes_min'])}",
            *_partitions(report),
            *_buffers(plan),
            f"what is trained takes pages of {format_size(plan['trained_page_bytes'])}, with its "
            f"gradients and state; they hold {format_size(plan['trained_bytes'])}",
            *snapshot_room(plan["snapshot_bytes"]),
            table(rows),
            table(units),
        ]
    )


def plan_line(paper: PaperPlan, bound: Bound) -> str:
    """The plan of a step, in one line."""
    plan, run = paper.plan, paper.simulate()
    ways = Counter((in_words(unit.activation), unit.slices) for unit in plan.units)
    units = ", ".join(
        f"{format_count(count, 'unit')} {_verb(way, count)}"
        + (f" in {slices} slices" if slices > 1 else "")
        for (way, slices), count in ways.items()
    )
    resting = ""
    if plan.resting_device_bytes:
        whole = format_count(sum(unit.on_device for unit in plan.units), "whole unit")
        resting = f" and {format_size(plan.resting_device_bytes)} for {whole}"
    return (
        f"{units}; device peak {format_size(plan.peaks['device'].bytes)}, of it "
        f"{format_size(plan.param_device_bytes)} for parameters{resting}; "
        f"{like(run.step_seconds)(run.step_seconds)} a step predicted, "
        f"{bound.seconds / run.step_seconds:.0%} of the bound ({bound.what})"
    )


def _verb(way: str, count: int) -> str:
    """One unit swaps to host, several swap to host."""
    verb, space, rest = way.partition(" ")
    return f"{verb}{'s' * (count == 1)}{space}{rest}"


def _partitions(report: PlanReport) -> list[str]:
    """A line on the ranks, where there are several."""
    if not report.partition:
        return []
    return [f"{report.ranks} ranks; activations aside, {report.partition}"]


def partition_text(ranks: int, whole: int, count: int) -> str:
    """What is shared out among the ranks where so many of all units rest on a rank's device whole,
    in a sentence; empty where there is one rank, or are no units."""
    if ranks == 1 or count == 0:
        return ""
    if whole == 0:
        return (
            "no unit rests on a rank's device whole, parameters come from their owners when they "
            "are needed: ZeRO-3"
        )
    verb = "rests" if whole == 1 else "rest"
    which = f"{whole} of {count} units {verb}" if whole < count else "all units rest"
    rest = "; what does not is ZeRO-3" if whole < count else ""
    return (
        f"{which} on a rank's device whole, which is ZeRO-1/2-like: parameters there, gradients "
        f"and optimizer state with their owners{rest}"
    )


def _buffers(plan: Plan) -> list[str]:
    """A line on what is always in host memory, where anything is."""
    if plan["buffer_bytes"] == 0:
        return []
    size = format_size(plan["buffer_bytes"])
    return [f"{size} of host memory are set aside for gradients and scales of moments"]


def snapshot_room(size: int) -> list[str]:
    """A line on the room that snapshots have on the SSD, where they have any."""
    return [f"{format_size(size)} of the SSD are set aside for snapshots"] if size else []


def like(seconds: float | None) -> Callable[[float], str]:
    """Writes times in the unit and with the digits that suit this one, so that times which stand
    beside each other compare at a glance. None: nothing is known that they could be like."""
    scale, unit = (1e3, "ms") if seconds is not None and seconds < 1 else (1.0, "s")
    if seconds is not None and LONG_SECONDS <= seconds < inf:
        name, size = duration_unit(seconds)
        scale, unit = 1 / size, f"{name}s"
    size = abs(seconds or 1.0) * scale
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return lambda value: f"{value * scale:,.{digits}f} {unit}"


def report_text(report: Report) -> str:
    """A report as tables."""
    return "\n\n".join(_paragraphs(report))


def _paragraphs(report: Report) -> Iterator[str]:
    head = format_count(report.steps, "step")
    if report.steps_nonfinite:
        head += f", {report.steps_nonfinite} not finite ({report.steps_skipped} skipped)"
    if report.grad_norm is not None:
        head += f"; last gradient norm {report.grad_norm:.4g}"
    head += f"; {report.backend} backend, pages of {format_size(report.page_bytes)}"
    head += f", {report.io_engine} I/O" if report.io_engine else ""
    if errors := report.stats.get("io_errors"):
        head += f"; {errors} errors of the SSD that passed"
    if where := report.stats.get("workers_where"):  # reports of files may not have it
        head += f"; workers {where}"
    about = [part for part in (report.model, report.command, report.machine) if part]
    lines = ["; ".join(about), head, speed_line(report), report.limited, report.partition]
    yield "\n".join(line for line in lines if line)
    tiers = [["tier", "budget", "used", "peak", "planned peak", "at"], *tier_rows(report)]
    yield table(tiers if report.peaks else [row[:4] for row in tiers])
    links = [["link", "moved", "per step"]]
    for name in {**report.link_bytes, **report.link_bytes_per_step}:
        moved = report.link_bytes.get(name)
        each = report.link_bytes_per_step.get(name, (moved or 0) / max(1, report.steps))
        links.append([name, format_size(moved) if moved is not None else "", format_size(each)])
    below = (wear_line(report), machines_line(report), gpus_line(report))
    yield "\n".join([table(links), *(line for line in below if line)])
    yield _waits(report)
    if report.lags:
        titles, *lags, total = lag_rows(report.lags)
        lags.sort(key=lambda row: -int(row[-1]))  # stable: in order where nothing was waited for
        yield table([titles, *lags[:WAITS_SHOWN], total])
    if report.planned:
        # Units in a row of which the plan says the same share a line.
        yield table([PLAN_HEAD, *runs((row.unit, planned_cells(row)) for row in report.planned)])


def speed_line(report: Report) -> str:
    """A step's time: measured, predicted, and beside its lower bound; empty: nothing is known."""
    parts = []
    seconds = step_times(report)
    if report.measured_seconds is not None:
        parts.append(f"{seconds(report.measured_seconds)} a step{judged_over(report)}")
    if report.predicted_seconds is not None:
        parts.append(f"{seconds(report.predicted_seconds)} predicted")
    if report.bound_seconds is not None:
        parts.append(f"lower bound {seconds(report.bound_seconds)} ({report.bound_what})")
    if report.percent_of_bound is not None:
        parts.append(f"{report.percent_of_bound:.0f} % of it reached")
    return ", ".join(parts)


def step_times(report: Report) -> Callable[[float], str]:
    """How all times of a report's steps are written."""
    known = (report.measured_seconds, report.predicted_seconds, report.bound_seconds)
    return like(next((seconds for seconds in known if seconds is not None), None))


def judged_over(report: Report) -> str:
    """Over how much a step's time was measured, in brackets; empty: over some steps."""
    if report.judged is None:
        return ""
    over = f" (over {like(report.judged.seconds)(report.judged.seconds)}"
    return over + (")" if report.judged.whole else ": too short to say much)")


def wear_line(report: Report) -> str:
    """What is written to the SSD; empty: nothing."""
    if report.wear is None or report.ssd_written_per_step is None:
        return ""
    return (
        f"{format_size(report.ssd_written_per_step)} a step are written to the SSD: "
        f"{format_decimal(report.wear.tb_per_day * UNITS['TB'])} a day at this rate, 100 TB in "
        f"{format_duration(report.wear.days_per_100_tb * DAY_SECONDS)}"
    )


def machines_line(report: Report) -> str:
    """What this rank has sent to other machines, and whether it is exact; empty: nothing."""
    if not report.machines_sent_bytes:
        return ""
    line = f"sent to other machines: {format_size(report.machines_sent_bytes)}"
    if report.rank_sums == "machines":
        line += ", gradients as sums of machines (rank_sums)"
    if report.rank_gathers == "exact":
        return line
    return (
        f"{line}, parameters as {report.rank_gathers} codes (rank_gathers): lossy, machines "
        "compute with values that differ by the rounding"
    )


def gpus_line(report: Report) -> str:
    """What came from GPUs of other ranks; empty: nothing."""
    if not report.from_gpus_bytes:
        return ""
    return f"parameters from GPUs of other ranks: {format_size(report.from_gpus_bytes)}"


def _waits(report: Report) -> str:
    if not report.stalls:
        total = sum(report.waited_seconds.values())
        in_all = like(total)
        waits = [["waited for pages of", "since wrap()"]]
        for name, seconds in sorted(report.waited_seconds.items(), key=lambda item: -item[1]):
            waits.append([name, in_all(seconds)])
        del waits[WAITS_SHOWN + 1 :]
        waits.append([ALL_UNITS, in_all(total)])
        return table(waits)
    each = step_times(report)
    rows = stall_rows(report)
    stalls = [["time lost", "per step"]]
    stalls += [[name, each(seconds)] for name, seconds in rows[:WAITS_SHOWN]]
    stalls.append([ALL_UNITS, each(sum(seconds for _, seconds in rows))])
    return table(stalls)


def tier_rows(report: Report) -> Iterator[list[str]]:
    """By tier: its budget, what is used, the most that was, the planned peak and where that is."""
    for name, tier in report.tiers.items():
        peak = report.peaks.get(name)
        planned = [format_size(peak.bytes), peak.where] if peak else ["", ""]
        yield [name, *map(format_size, (tier.budget, tier.used, tier.peak)), *planned]


def stall_rows(report: Report) -> list[tuple[str, float]]:
    """What was waited for, and the seconds of a step; the longest first."""
    rows = [
        (stall_name(cause, unit), seconds)
        for cause, units in report.stalls.items()
        for unit, seconds in units.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def lag_rows(lags: Sequence[Lag]) -> list[list[str]]:
    """How old the parameters were that forwards saw: a head, a row for each unit, and the sums."""
    steps = max(len(lag.forwards) for lag in lags)
    counts = [
        [*lag.forwards, *[0] * (steps - len(lag.forwards)), lag.merged, lag.waits] for lag in lags
    ]
    rows = [*counts, [sum(column) for column in zip(*counts, strict=True)]]
    names = [*(lag.unit for lag in lags), ALL_UNITS]
    ages = ["forwards, newest", *(f"{step} old" for step in range(1, steps))]
    return [
        ["unit", *ages, "merged gradients", "update waits"],
        *([name, *map(str, row)] for name, row in zip(names, rows, strict=True)),
    ]


def runs(rows: Iterable[tuple[str, list[str]]]) -> Iterator[list[str]]:
    """Rows of a name and cells: those in a row with the same cells share a line."""
    for cells, run in itertools.groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in run]
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        yield [name, *cells]


def planned_cells(row: PlannedRow) -> list[str]:
    """A row of the plan's table, behind the unit's name."""
    activation = in_words(row.activation)
    resident = "yes" if row.resident else "no"
    return [activation, str(row.slices), row.params, row.grads, row.states, resident]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first one left-aligned, the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


WORN_SHARE = 0.05  # of the endurance that one run may take without a warning
DAY_SECONDS = 86400


def wear_lines(
    bytes_per_step: float,
    endurance_bytes: int | None = None,
    steps: int | None = None,
    step_seconds: float | None = None,
) -> list[str]:
    """Sentences for people; none where nothing is written. `steps`: of the whole run."""
    if not bytes_per_step:
        return []
    written = [f"{format_decimal(bytes_per_step)} a step are written to the SSD"]
    if step_seconds:
        written.append(f"{format_decimal(bytes_per_step * DAY_SECONDS / step_seconds)} a day")
    if steps:
        written.append(f"{format_decimal(steps * bytes_per_step)} in {format_count(steps, 'step')}")
    lines = [", ".join(written)]
    if endurance_bytes:
        lasts = endurance_bytes / bytes_per_step
        lines.append(
            f"a drive of {format_decimal(endurance_bytes)} endurance is worn out in "
            f"{_rounded(lasts)}"
            + (f" ({format_duration(lasts * step_seconds)})" if step_seconds else "")
        )
        if steps and steps * bytes_per_step > WORN_SHARE * endurance_bytes:
            share = 100 * steps * bytes_per_step / endurance_bytes
            lines.append(
                f"warning: this run takes {format_number(share)} % of the drive's endurance"
            )
    return lines


def format_decimal(size: float) -> str:
    """As drives are sold: 600 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB" if size >= 100 else f"{size:.3g} TB"


def _rounded(count: float) -> str:
    """Two digits of it: 7,100 steps."""
    if count < 1:
        return "less than a step"
    unit = 10 ** max(0, floor(log10(max(1.0, count))) - 1)
    rounded = floor(count / unit) * unit
    return format_count(rounded, "step")
