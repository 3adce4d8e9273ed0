"""Writes steps as a trace that ui.perfetto.dev and chrome://tracing open.

    perfetto.write(report.records, Path("step.json"))

The format is the JSON array form of Chrome's trace events: {"traceEvents": [event, ...]}, times in
microseconds since the first step shown. A lane is a thread of the one process: steps, computation,
waiting, each link, each worker. Spans that overlap without one being inside the other cannot share
a lane, so a link with several transfers in flight has several lanes. Bandwidths are counters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._profiling.timeline import LINKS, StepRecord, bandwidth, stall_name
from .._storage.replacing import write_text

PROCESS = 1
COUNTER_BINS = 200  # per step

Event = dict[str, Any]


@dataclass
class _Span:
    lane: str
    name: str
    category: str
    begin: float  # seconds of perf_counter()
    end: float
    details: dict[str, Any] = field(default_factory=dict)


def write(records: Sequence[StepRecord], path: Path) -> None:
    """Writes a trace. Raises ValueError where nothing was recorded."""
    if not records:
        raise ValueError("no step was recorded, so there is nothing to show")
    write_text(path, json.dumps(trace(records)))


def trace(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The trace as JSON has it."""
    spans = [span for record in records for span in _spans(record)]
    origin = min((span.begin for span in spans), default=0.0)
    events: list[Event] = [_named("process_name", 0, "strata")]
    thread = 0
    for lane in _in_order({span.lane for span in spans}):
        for i, row in enumerate(_rows([span for span in spans if span.lane == lane])):
            thread += 1
            events.append(_named("thread_name", thread, lane if i == 0 else f"{lane} {i + 1}"))
            events.append(
                {**_named("thread_sort_index", thread, ""), "args": {"sort_index": thread}}
            )
            events += [_complete(span, thread, origin) for span in row]
    for record in records:
        events += _counters(record, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(record: StepRecord) -> list[_Span]:
    spans = [_Span("steps", f"step {record.step}", "step", record.begin, record.end)]
    for use in record.uses:
        way = "backward" if use.backward else "forward"
        name = f"{way} {record.name(use.unit)}"
        spans.append(_Span("compute", name, way, use.entered, use.left))
    for span in record.spans:
        track, unit = span["track"], record.name(span["unit"])
        begin, end = span["begin_ns"] * 1e-9, span["end_ns"] * 1e-9
        details: dict[str, Any] = {"unit": unit}
        if span["bytes"]:
            details |= {"bytes": span["bytes"], "GB/s": _rate(span["bytes"], end - begin)}
        if track == "wait":
            name = stall_name(span["cause"], unit)
            details["use"] = "backward" if span["backward"] else "forward"
            spans.append(_Span("waiting", name, "stall", begin, end, details))
        elif track == "update":
            lane = f"worker {span['lane']}"
            spans.append(_Span(lane, f"update {unit}", track, begin, end, details))
        else:
            spans.append(_Span(LINKS[track], unit, track, begin, end, details))
    return spans


def _in_order(lanes: set[str]) -> list[str]:
    first = ["steps", "compute", "waiting", *LINKS.values()]
    workers = sorted(lanes - set(first), key=lambda lane: (len(lane), lane))
    return [lane for lane in first if lane in lanes] + workers


def _rows(spans: list[_Span]) -> list[list[_Span]]:
    """Shares spans out among as few rows as needed, so that those of a row nest or are apart."""
    rows: list[list[_Span]] = []
    open_ends: list[list[float]] = []  # by row: ends of the spans that are open, outermost first
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                row.append(span)
                ends.append(span.end)
                break
        else:
            rows.append([span])
            open_ends.append([span.end])
    return rows


def _complete(span: _Span, thread: int, origin: float) -> Event:
    # Both ends are rounded, and not the duration, so that nested spans stay nested.
    begin, end = (round((at - origin) * 1e6, 3) for at in (span.begin, span.end))
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "name": span.name,
        "cat": span.category,
        "ts": begin,
        "dur": round(max(0.0, end - begin), 3),
        "args": span.details,
    }


def _named(what: str, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": what, "args": {"name": name}}


def _counters(record: StepRecord, origin: float) -> list[Event]:
    events = []
    for track, link in LINKS.items():
        rates = bandwidth(record, track, COUNTER_BINS)
        if not any(rates):
            continue
        for i, rate in enumerate([*rates, 0.0]):
            at = record.begin - origin + i * record.seconds / COUNTER_BINS
            events.append(
                {
                    "ph": "C",
                    "pid": PROCESS,
                    "name": f"{link}, GB/s",
                    "ts": round(at * 1e6, 3),
                    "args": {"GB/s": round(rate / 1e9, 4)},
                }
            )
    return events


def _rate(size: int, seconds: float) -> float:
    return round(size / max(seconds, 1e-9) / 1e9, 3)
