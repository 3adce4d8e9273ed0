"""The figures of a report as SVG, to stand inside a page: no files, no fonts, no scripts.

html_figures.activity(record, simulation)        # "<svg ...>...</svg>"
    held_by_tier(plan, trace)["host"][7]             # bytes, at the eighth use of a unit
    moments(trace, record)[7]                        # (unit, backward, begin, end)
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from .._config.choices import TO_SSD, in_words, leaves
from .._config.sizes import duration_unit
from .._profiling.timeline import CAUSES, LINKS, StepRecord, bandwidth, rates
from .report_text import LONG_SECONDS

if TYPE_CHECKING:
    from .._core import Simulation, StepPlan, Trace
    from .reports import PlannedPeak, PlannedRow

BINS = 240  # of a step
WIDTH = 10  # inches
MIB, GIB = 2**20, 2**30
UNITS_NAMED_MAX = 120  # beyond, only some units have their name beside them
STALLED_UNITS_MAX = 25

WAYS = {False: "#30415d", True: "#7a8fb8"}  # forward, backward
ACTIVATIONS = {
    "keep": "#8cc084", "swap_host": "#edae49", "swap_ssd": "#00798c", "recompute": "#d8dce3",
    "recompute_host": "#f3ddb3", "recompute_ssd": "#a9cdd3",
}  # fmt: skip
TIER_COLOURS = {"device": "#d1495b", "host": "#edae49", "ssd": "#00798c"}
CAUSE_COLOURS = {
    "update": "#8e5ea2", "frame": "#d1495b", "room": "#f28e2b", "ssd": "#00798c", "copy": "#edae49",
}  # fmt: skip
LINK_COLOURS = {
    "read": "#00798c", "write": "#66a182", "upload": "#d1495b", "download": "#8e5ea2",
}  # fmt: skip
DASHED: dict[str, Any] = {"color": "#30415d", "linestyle": "--", "linewidth": 1}
PREDICTED, BOUND = "#8a5a00", "#c2185b"

# Text stays text, and is taken literally: names may hold what elsewhere is mathematics.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "strata", "text.parse_math": False, "font.size": 9}


def activity(record: StepRecord, simulation: Simulation | None) -> str:
    """What was busy over a step: computation and waits, every link, the workers."""
    tracks = [t for t in LINKS if any(s["track"] == t for s in record.spans)]
    updates = [s for s in record.spans if s["track"] == "update"]
    rows = 1 + len(tracks) + bool(updates)
    with rc_context(STYLE):
        figure, axes = _figure(rows, 1.0 + 1.1 * rows)
        _draw_compute(axes[0], record)
        for row, track in zip(axes[1:], tracks, strict=False):
            _draw_link(row, record, track, simulation)
        if updates:
            parts = [(*record.seconds_of(s), (s["end_ns"] - s["begin_ns"]) * 1e-9) for s in updates]
            _draw_steps(axes[-1], rates(parts, record.seconds, BINS), record.seconds, "#66a182")
            axes[-1].set_ylabel("workers\nbusy")
        _time_axis(axes[-1], 0, record.seconds)
        return _svg(figure)


def _draw_compute(axes: Any, record: StepRecord) -> None:
    for backward, colour in WAYS.items():
        bars = [
            (use.entered - record.begin, use.left - use.entered)
            for use in record.uses
            if use.backward == backward
        ]
        label = "backward" if backward else "forward"
        axes.broken_barh(bars, (1, 0.9), facecolors=colour, label=label)
    for cause, colour in CAUSE_COLOURS.items():
        waits = [
            record.seconds_of(s)
            for s in record.spans
            if s["track"] == "wait" and s["cause"] == cause
        ]
        if waits:
            label = "waiting for " + CAUSES[cause].replace("{unit}", "a unit")
            bars = [(begin, end - begin) for begin, end in waits]
            axes.broken_barh(bars, (0, 0.9), facecolors=colour, label=label)
    axes.set_yticks([0.45, 1.45], ["waiting", "computing"])
    _legend(axes, 4)


def _draw_link(axes: Any, record: StepRecord, track: str, simulation: Simulation | None) -> None:
    measured = [rate / 1e9 for rate in bandwidth(record, track, BINS)]
    _draw_steps(axes, measured, record.seconds, LINK_COLOURS[track])
    spans = [s for s in simulation.spans if s.lane == track] if simulation else []
    if simulation and spans:
        parts = [(s.begin, s.end, s.bytes / 1e9) for s in spans]
        predicted = rates(parts, simulation.step_seconds, BINS)
        axes.stairs(predicted, _edges(simulation.step_seconds), **DASHED)
        axes.set_ylim(0, max(*measured, *predicted) * 1.1)
    axes.set_ylabel(f"{LINKS[track]}\nGB/s")


def _draw_steps(axes: Any, values: Sequence[float], seconds: float, colour: str) -> None:
    axes.stairs(values, _edges(seconds), fill=True, color=colour, alpha=0.85)
    axes.set_ylim(0, max([*values, 1e-9]) * 1.1)
    axes.grid(alpha=0.3)


def _edges(seconds: float) -> list[float]:
    return [i * seconds / BINS for i in range(BINS + 1)]


def residency(
    held: dict[str, list[int]], at: Sequence[Moment], peaks: dict[str, PlannedPeak]
) -> str:
    """Bytes of each tier over the step, below its budget."""
    tiers = [tier for tier in TIER_COLOURS if any(held[tier])]
    with rc_context(STYLE):
        figure, rows = _figure(len(tiers), 0.6 + 1.4 * len(tiers))
        # In order, also where a use ends behind the begin of the next.
        times = list(accumulate([*(begin for _, _, begin, _ in at), at[-1][3]], max))
        for axes, tier in zip(rows, tiers, strict=True):
            top = max([*held[tier], peaks[tier].budget if tier in peaks else 0])
            name, size = ("GiB", GIB) if top >= GIB else ("MiB", MIB)
            values = [held_now / size for held_now in held[tier]]
            axes.stairs(values, times, fill=True, color=TIER_COLOURS[tier], alpha=0.85)
            if tier in peaks:
                axes.axhline(peaks[tier].budget / size, **DASHED)
            axes.set_ylim(0, 1.1 * top / size)
            axes.set_ylabel(f"{tier}\n{name}")
            axes.grid(alpha=0.3)
        _time_axis(rows[-1], times[0], times[-1], "; dashed: the budget")
        return _svg(figure)


def units(names: Sequence[str], at: Sequence[Moment], planned: Sequence[PlannedRow]) -> str:
    """Units by moments: when each is in use, and what becomes of its activations in between."""
    order = list(dict.fromkeys(unit for unit, _, _, _ in at))
    row_of = {unit: row for row, unit in enumerate(order)}
    between = {unit: _between(unit, at) for unit in order}
    with rc_context(STYLE):
        figure, (axes,) = _figure(1, min(60.0, 1.2 + 0.17 * len(order)))
        for name, colour in ACTIVATIONS.items():
            boxes = [
                (row_of[unit], *between[unit])
                for unit, plan in enumerate(planned)
                if plan.activation == name and unit in row_of
            ]
            if boxes:
                _boxes(axes, boxes, 0.45, color=colour, label=in_words(name))
        for backward, colour in WAYS.items():
            boxes = [(row_of[u], begin, end) for u, way, begin, end in at if way == backward]
            _boxes(axes, boxes, 0.8, color=colour, label="backward" if backward else "forward")
        for unit, plan in enumerate(planned):
            if plan.slices > 1 and unit in row_of:
                middle = sum(between[unit]) / 2
                text = f"in {plan.slices} slices"
                axes.text(middle, row_of[unit], text, ha="center", va="center", fontsize=7)
        every = -(-len(order) // UNITS_NAMED_MAX)
        shown = range(0, len(order), every)
        axes.set_yticks(list(shown), [names[order[row]] for row in shown], fontsize=7)
        axes.set_ylim(len(order) - 0.5, -0.5)
        _time_axis(axes, 0, max(end for _, _, _, end in at))
        _legend(axes, 6)
        return _svg(figure)


def _between(unit: int, at: Sequence[Moment]) -> tuple[float, float]:
    """From the end of the unit's last forward to its first backward behind that."""
    begin = max((end for u, backward, _, end in at if u == unit and not backward), default=0.0)
    after = [b for u, backward, b, _ in at if u == unit and backward and b >= begin]
    return begin, min(after, default=begin)


def times(records: Sequence[StepRecord], bound_seconds: float | None) -> str:
    """Step times as measured, beside the predicted ones and the lower bound."""
    scale, unit = _scale(max(record.seconds for record in records))
    with rc_context(STYLE):
        figure, (axes,) = _figure(1, 2.6)
        at = list(range(len(records)))
        measured = [record.seconds * scale for record in records]
        axes.bar(at, measured, color="#7a8fb8", width=0.6, label="measured")
        predicted = [
            r.predicted_seconds * scale for r in records if r.predicted_seconds is not None
        ]
        if len(predicted) == len(records):
            edges = [i - 0.5 for i in range(len(records) + 1)]
            axes.stairs(predicted, edges, baseline=None, color=PREDICTED, linestyle="--",
                        linewidth=1.5, label="predicted")  # fmt: skip
        if bound_seconds is not None:
            axes.axhline(bound_seconds * scale, color=BOUND, linestyle=":", linewidth=2,
                         label="lower bound of windows of seconds")  # fmt: skip
        axes.set_xticks(at, [str(record.step) for record in records])
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3, axis="y")
        _legend(axes, 3)
        return _svg(figure)


def _time_axis(axes: Any, begin: float, end: float, more: str = "") -> None:
    """Positions are seconds; what is written is what times of such steps are told in."""
    scale, unit = _scale(end)
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    axes.set_xlabel(f"{unit} since the step began{more}")


def _scale(seconds: float) -> tuple[float, str]:
    """What times like this one are drawn in."""
    if seconds >= LONG_SECONDS:
        name, size = duration_unit(seconds)
        return 1 / size, f"{name}s"
    return (1e3, "milliseconds") if seconds < 1 else (1.0, "seconds")


def stalls(by_cause: dict[str, dict[str, float]], step_seconds: float) -> str:
    """Time lost per step, by unit and cause, the units that lose most."""
    scale, unit_of_time = _scale(step_seconds)
    total: dict[str, float] = {}
    for lost in by_cause.values():
        for unit, seconds in lost.items():
            total[unit] = total.get(unit, 0.0) + seconds
    shown = sorted(total, key=lambda unit: -total[unit])[:STALLED_UNITS_MAX]
    with rc_context(STYLE):
        figure, (axes,) = _figure(1, 1.2 + 0.22 * len(shown))
        left = [0.0] * len(shown)
        for cause, lost in by_cause.items():
            values = [scale * lost.get(unit, 0.0) for unit in shown]
            label = CAUSES[cause].replace("{unit}", "the unit")
            axes.barh(range(len(shown)), values, left=left, color=CAUSE_COLOURS[cause], label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(shown)), shown, fontsize=7)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel(f"{unit_of_time} lost per step, waiting for")
        axes.grid(alpha=0.3, axis="x")
        _legend(axes, 5)
        return _svg(figure)


def _legend(axes: Any, columns: int) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    axes.legend(ncols=columns, fontsize="small", frameon=False, **place)


def _boxes(
    axes: Any, boxes: Sequence[tuple[int, float, float]], height: float, **more: Any
) -> None:
    """Boxes of (row, begin, end), as one thing to draw: there may be thousands."""
    low, high = -height / 2, height / 2
    corners = [
        [(begin, row + low), (end, row + low), (end, row + high), (begin, row + high)]
        for row, begin, end in boxes
    ]
    axes.add_collection(PolyCollection(corners, **more))


def _figure(rows: int, height: float) -> tuple[Any, list[Any]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
    for each in axes[:, 0]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:, 0])


def _svg(figure: Any) -> str:
    """The figure as an element of a page: as wide as there is room, with no id that another figure
    has too, and nothing that names a place on the network."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r'<g id="[^"]*"', "<g", text)


Moment = tuple[int, bool, float, float]  # unit, backward, begin and end in seconds of the step


def held_by_tier(plan: StepPlan, trace: Trace) -> dict[str, list[int]]:
    """Bytes of each tier by use: what rests there, and the activations that are swapped to it from
    the use that saves them to the one that reads them last."""
    uses = len(trace.uses)
    held = {
        "device": list(plan.device_curve),
        "host": [plan.resting_host_bytes] * uses,
        "ssd": [plan.resting_ssd_bytes] * uses,
    }
    for tensor in trace.tensors:
        activation = plan.units[tensor.unit].activation
        if not leaves(activation, tensor.input):
            continue
        tier = "ssd" if activation in TO_SSD else "host"
        for use in range(tensor.born, min(tensor.last_used + 1, uses)):
            held[tier][use] += tensor.bytes
    return held


def moments(trace: Trace | None, record: StepRecord | None) -> list[Moment]:
    """The uses of the trace (of the record, where there is no trace), each at the time at which the
    record has it. What the record lacks takes no time; where it lacks most, the times are the
    traced ones, without waits."""
    measured = (
        [(u.unit, u.backward, u.entered - record.begin, u.left - record.begin) for u in record.uses]
        if record
        else []
    )
    if trace is None:
        return measured
    found: list[Moment] = []
    at = 0
    missing = 0
    for use in trace.uses:
        key = (use.unit, use.backward)
        next_at = next((i for i in range(at, len(measured)) if measured[i][:2] == key), None)
        if next_at is None:
            now = found[-1][3] if found else 0.0
            found.append((*key, now, now))
            missing += 1
        else:
            found.append(measured[next_at])
            at = next_at + 1
    return found if 2 * missing < len(found) else _traced(trace)


def _traced(trace: Trace) -> list[Moment]:
    """One use after the other, for as long as each computed."""
    result = []
    at = 0.0
    for use in trace.uses:
        at += use.gap_seconds
        result.append((use.unit, use.backward, at, at + use.seconds))
        at += use.seconds
    return result
