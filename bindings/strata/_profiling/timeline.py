"""What happened in the last steps, for people to look at: what every unit computed, what every link
and worker did meanwhile, and what was waited for.

    log = StepLog(session, unit_names)
    log.end_step(begin, end, uses)              # behind every optimizer.step()
    stall_seconds(steady(log.records))          # {"ssd": {"layers.7": 0.031}}

Times are seconds of time.perf_counter(), which is also the clock of the core's spans. Use from the
thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._core import Session, TimelineSpan

STEPS_KEPT = 8
LINKS = {
    "read": "ssd to host",
    "write": "host to ssd",
    "upload": "host to device",
    "download": "device to host",
}
# In the order of a page's way; each is a sentence with the unit's name.
CAUSES = {
    "update": "the update of {unit}",
    "frame": "device memory for {unit}",
    "room": "host memory for {unit}",
    "ssd": "{unit} from ssd",
    "copy": "{unit} from host memory",
}
ALL_UNITS = "all units"


@dataclass(frozen=True)
class UseSpan:
    """A unit in use: requested, then there, then left."""

    unit: int
    backward: bool
    wait_began: float
    entered: float
    left: float

    @staticmethod
    def of(use: Any) -> UseSpan:
        """From anything that has the same attributes, such as the recorder's uses."""
        return UseSpan(use.unit, use.backward, use.wait_began, use.entered, use.left)


@dataclass(frozen=True)
class StepRecord:
    """One step. Spans that began in the step before, or that run on into the next, are whole."""

    step: int  # counted from 0
    begin: float
    end: float
    uses: list[UseSpan]
    spans: list[TimelineSpan]
    units: list[str]  # names
    predicted_seconds: float | None = None  # by the plan that the step ran under
    plan: int = 0  # its number in this run; 0: there was none

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.begin

    def name(self, unit: int) -> str:
        """Of a unit; spans that belong to none have -1."""
        return self.units[unit] if 0 <= unit < len(self.units) else ALL_UNITS

    def seconds_of(self, span: TimelineSpan) -> tuple[float, float]:
        """Begin and end of a span, since the step began."""
        return span["begin_ns"] * 1e-9 - self.begin, span["end_ns"] * 1e-9 - self.begin


class StepLog:
    """The records of the last steps, oldest first."""

    def __init__(self, session: Session, units: Sequence[str], keep: int = STEPS_KEPT) -> None:
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self._session = session
        self._units = list(units)
        self._steps = 0

    def end_step(
        self,
        begin: float | None,
        end: float,
        uses: Iterable[UseSpan],
        predicted_seconds: float | None = None,
        plan: int = 0,
    ) -> StepRecord:
        """Records the step that lasted from `begin` (None: the end of the last one) to `end`, and
        what the core did since the last call."""
        uses = list(uses)
        if begin is None:
            begin = (
                self.records[-1].end
                if self.records
                else min((u.wait_began for u in uses), default=end)
            )
        spans = self._session.timeline()
        if self._steps == 0:  # what came before, such as the loading of weights, is no step's
            spans = [span for span in spans if span["end_ns"] * 1e-9 >= begin]
        record = StepRecord(
            self._steps, begin, end, uses, spans, self._units, predicted_seconds, plan
        )
        self._steps += 1
        self.records.append(record)
        return record


def stall_name(cause: str, unit: str) -> str:
    """What people read: "waiting for layers.7 from ssd"."""
    return "waiting for " + CAUSES.get(cause, "{unit}").replace("{unit}", unit)


def steady(records: Iterable[StepRecord]) -> list[StepRecord]:
    """The newest records that ran under one plan: others say nothing about it. Nor does the very
    first step, in which everything comes when it is asked for, where there is another."""
    kept: list[StepRecord] = []
    for record in reversed(list(records)):
        if kept and (record.plan != kept[0].plan or record.step == 0):
            break
        kept.append(record)
    return kept[::-1]


def measured_seconds(records: Sequence[StepRecord]) -> float | None:
    """The median of the steps; None where there is none."""
    return median(record.seconds for record in records) if records else None


def stall_seconds(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Seconds waited per step, by cause and unit, the largest cause and unit first."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for span in record.spans:
            if span["track"] != "wait":
                continue
            units = found.setdefault(span["cause"], {})
            name = record.name(span["unit"])
            seconds = (span["end_ns"] - span["begin_ns"]) * 1e-9 / len(records)
            units[name] = units.get(name, 0.0) + seconds
    ordered = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    return {cause: dict(sorted(units.items(), key=lambda u: -u[1])) for cause, units in ordered}


def link_bytes(records: Sequence[StepRecord]) -> dict[str, float]:
    """Bytes moved per step, by link."""
    moved = dict.fromkeys(LINKS.values(), 0.0)
    for record in records:
        for span in record.spans:
            if span["track"] in LINKS:
                moved[LINKS[span["track"]]] += span["bytes"] / len(records)
    return moved


def bandwidth(record: StepRecord, track: str, bins: int) -> list[float]:
    """Bytes per second of a track in equal parts of the step."""
    spans = [s for s in record.spans if s["track"] == track]
    return rates([(*record.seconds_of(s), s["bytes"]) for s in spans], record.seconds, bins)


def rates(parts: Iterable[tuple[float, float, float]], seconds: float, bins: int) -> list[float]:
    """What was done per second in equal parts of `seconds`, given (begin, end, amount) each. An
    amount is spread evenly over its time; what lies outside is left out."""
    found = [0.0] * bins
    width = seconds / bins
    if width <= 0:
        return found
    for begin, end, amount in parts:
        end = max(end, begin + 1e-9)
        for i in range(max(0, int(begin / width)), min(bins, int(end / width) + 1)):
            shared = min(end, (i + 1) * width) - max(begin, i * width)
            found[i] += amount / (end - begin) * max(0.0, shared) / width
    return found
