"""A report as one page that opens in a browser without a network: figures are SVG inside it.

    Path("report.html").write_text(html_report.page(Report.load("report.json")))

Every name that comes from a model is escaped. What a report does not know (no plan, no step yet) is
said in place of its figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .._config.sizes import format_count, format_size
from .._profiling.timeline import LINKS
from . import html_figures as figures
from .html_figures import moments
from .report_text import (
    PLAN_HEAD,
    judged_over,
    lag_rows,
    like,
    planned_cells,
    stall_rows,
    step_times,
    tier_rows,
    wear_line,
)
from .reports import Report

COLUMNS_MAX = 4  # that a phone has room for
NOTHING = "\N{EN DASH}"  # in place of a figure that is not known
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 2em auto; max-width: 1080px;
       padding: 0 1em; }
h1 { margin-bottom: 0; }  h2 { margin-top: 2em; border-bottom: 1px solid #d8dce3; }
.tiles { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.5em 0; }
.tile { background: #f4f6f9; border-radius: 8px; padding: .7em 1.2em; min-width: 9em; }
.tile b { display: block; font-size: 1.6em; }
figure { margin: 1em 0; }  figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td, th { padding: .15em .8em; text-align: right; border-bottom: 1px solid #eceff3; }
td:first-child, th:first-child { text-align: left; }
.none, .about { color: #6b7280; }  .about { overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { margin: 1em auto; }
  .tile { min-width: 7em; flex: 1 0 35%; padding: .5em .8em; }  .tile b { font-size: 1.3em; }
  figure { overflow-x: auto; }  figure svg { min-width: 640px; }
  td, th { padding: .15em .4em; }
  .cards tr:first-child { display: none; }
  .cards, .cards tbody, .cards tr { display: block; }
  .cards tr { padding: .4em 0; border-bottom: 1px solid #d8dce3; }
  .cards td { display: inline-block; border: 0; padding: 0 .9em 0 0; text-align: left; }
  .cards td:first-child { display: block; font-weight: 600; overflow-wrap: anywhere; }
  .cards td[data-of]::before { content: attr(data-of) ": "; color: #6b7280; }
}
"""


def page(report: Report) -> str:
    """The whole page."""
    body = "\n".join(_sections(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>strata report</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    record = report.records[-1] if report.records else None
    yield "<h1>strata report</h1>"
    for line in (report.model, report.command, report.machine):
        if line:
            yield f'<div class="about">{escape(line)}</div>'
    yield (
        f"<p>{format_count(report.steps, 'step')}, {escape(report.backend)} backend, pages of "
        f"{format_size(report.page_bytes)}"
        + (f", {escape(report.io_engine)} I/O" if report.io_engine else "")
        + ".</p>"
    )
    yield _tiles(report)
    for sentence in filter(None, (report.limited, report.partition)):
        yield f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>"
    yield "<h2>Step time</h2>"
    if record:
        yield _figure(figures.times(report.records, report.bound_seconds))
    else:
        yield _none("no step was recorded")
    yield "<h2>Links and workers over a step</h2>"
    if record:
        dashed = " Dashed: as the plan predicts." if report.simulation else ""
        yield _figure(figures.activity(record, report.simulation), f"Step {record.step}.{dashed}")
    else:
        yield _none("no step was recorded")
    yield _links(report)
    yield "<h2>Time lost</h2>"
    yield from _stalls(report)
    if report.lags:
        yield "<h2>How far updates lagged</h2>"
        head, *rows = lag_rows(report.lags)
        yield "<p>Forwards since wrap(), by the age in steps of the parameters that they saw.</p>"
        yield _table(head, rows)
    yield "<h2>Memory over a step</h2>"
    if report.plan and report.trace and report.trace.uses:
        held = figures.held_by_tier(report.plan, report.trace)
        at = moments(report.trace, record)
        caption = "As planned, by tier; of host memory without the staging area."
        yield _figure(figures.residency(held, at, report.peaks), caption)
    else:
        yield _none("there is no plan")
    head = ["tier", "budget", "used by pages", "their peak", "planned peak", "at"]
    yield _table(head, list(tier_rows(report)))
    yield "<h2>Units over a step</h2>"
    names = [unit.name for unit in report.trace.units] if report.trace else []
    names = names or (record.units if record else [])
    at = moments(None, record) or moments(report.trace, None)
    if at:
        yield _figure(
            figures.units(names, at, report.planned),
            "Dark: in use. In between: what becomes of the tensors that its backward needs.",
        )
    else:
        yield _none("no step was recorded")
    yield "<h2>The plan</h2>"
    if report.planned:
        yield _table(PLAN_HEAD, [[row.unit, *planned_cells(row)] for row in report.planned])
    else:
        yield _none("there is none: activations are left to PyTorch, or no step was recorded yet")


def _tiles(report: Report) -> str:
    lost = sum(seconds for units in report.stalls.values() for seconds in units.values())
    time = step_times(report)

    def as_time(seconds: float | None) -> str:
        return NOTHING if seconds is None else time(seconds)

    tiles = [
        (f"a step, measured{judged_over(report)}", as_time(report.measured_seconds)),
        ("predicted", as_time(report.predicted_seconds)),
        (
            f"lower bound: {report.bound_what}" if report.bound_what else "lower bound",
            as_time(report.bound_seconds),
        ),
        ("of the lower bound", _percent(report.percent_of_bound)),
        ("lost to waiting, per step", as_time(lost if report.records else None)),
        ("written to the SSD per step", _size(report.ssd_written_per_step)),
    ]
    inner = "".join(
        f'<div class="tile"><b>{value}</b>{escape(label)}</div>' for label, value in tiles
    )
    wear = wear_line(report)
    return f'<div class="tiles">{inner}</div>' + (f"<p>{escape(wear)}.</p>" if wear else "")


def _links(report: Report) -> str:
    lanes = report.simulation.lanes if report.simulation else None
    rows = []
    for track, link in LINKS.items():
        moved = report.link_bytes_per_step.get(link)
        predicted = lanes[track].bytes if lanes else None  # type: ignore[index]
        total = report.link_bytes.get(link)
        rows.append([link, _size(moved), _size(predicted), _size(total)])
    return _table(["link", "bytes per step", "predicted", "moved since wrap()"], rows)


def _stalls(report: Report) -> Iterator[str]:
    if report.stalls:
        time = step_times(report)
        yield _figure(figures.stalls(report.stalls, report.records[-1].seconds))
        rows = [[name, time(seconds)] for name, seconds in stall_rows(report)]
        yield _table(["what was waited for", "per step"], rows)
    elif report.records:
        yield _none("nothing was waited for")
    else:
        waited = sorted(report.waited_seconds.items(), key=lambda row: -row[1])
        yield _table(
            ["waited for pages of", "since wrap()"],
            [[name, like(waited[0][1])(seconds)] for name, seconds in waited],
        )


def _figure(svg: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{below}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Where there is no room for many columns, as on a phone, each row is a block of its own whose
    cells say what they are."""
    cards = len(head) > COLUMNS_MAX

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    def card(cells: Sequence[str]) -> str:
        named = zip(head[1:], cells[1:], strict=True)
        rest = "".join(f'<td data-of="{escape(of)}">{escape(cell)}</td>' for of, cell in named)
        return f"<tr><td>{escape(cells[0])}</td>{rest}</tr>"

    body = "\n".join(card(row) if cards else line(row, "td") for row in rows)
    kind = ' class="cards"' if cards else ""
    return f'<div class="wide"><table{kind}>\n{line(head, "th")}\n{body}\n</table></div>'


def _none(why: str) -> str:
    return f'<p class="none">Nothing to show: {escape(why)}.</p>'


def _percent(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:.0f} %"


def _size(size: float | None) -> str:
    return NOTHING if size is None else format_size(size)
