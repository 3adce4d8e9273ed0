"""The page of a report, and the command that writes it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import made_up
import pytest
from strata._cli import main as cli
from strata._profiling.timeline import UseSpan
from strata._report import html_figures as figures
from strata._report import html_report
from strata._report.html_figures import held_by_tier, moments
from strata._report.reports import PlannedRow, Report

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page as a browser would, and refuses what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.fixture(scope="module")
def text() -> str:
    return html_report.page(made_up.report())


def test_it_is_one_page_without_a_network(text: str) -> None:
    page = Page(text)
    assert page.tags.count("svg") == 5
    assert "http" not in text
    assert "url(" not in text.replace("url(#", "")
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)


def test_names_are_escaped_and_none_is_missing(text: str) -> None:
    assert "<b>head" not in text
    words = Page(text).words
    for unit in made_up.UNITS:
        assert words.count(unit) >= 2, "in the plan's table, and beside a figure"


def test_it_says_what_there_is_to_say(text: str) -> None:
    words = Page(text).words
    for word in (
        "1.00 s", "0.95 s", "0.80 s", "80 %", "lower bound: computation",
        "waiting for layers.0 from ssd",
        "swap to host", "recompute", "in 4 slices", f"backward of {made_up.UNITS[3]}",
    ):  # fmt: skip
        assert word in words, word
    assert any("a day at this rate" in word for word in words)
    assert made_up.LIMITED[1:] + "." in " ".join(words)
    for word in ("Llama <3>", "strata finetune --steps=3", "a processor"):
        assert word in words, word


def test_times_beside_each_other_have_one_unit() -> None:
    short = made_up.report(measured_seconds=0.0421, predicted_seconds=0.0098, bound_seconds=0.004)
    words = Page(html_report.page(short)).words
    assert {"42.1 ms", "9.8 ms", "4.0 ms"} <= set(words)
    told = {w.split()[-1] for w in words if re.fullmatch(r"[0-9.]+ m?s", w)}
    assert told == {"ms"}


def test_bound_and_prediction_are_told_apart(text: str) -> None:
    assert figures.PREDICTED in text
    assert figures.BOUND in text
    assert figures.PREDICTED != figures.BOUND


def test_on_a_phone_each_row_of_the_plan_is_a_block_that_names_its_cells(text: str) -> None:
    assert '<td data-of="activations">swap to host</td>' in text
    assert "@media (max-width: 640px)" in text


def test_the_links_are_in_the_table(text: str) -> None:
    assert "<tr><td>ssd to host</td><td>6.0 MiB</td><td>5.0 MiB</td><td>18.0 MiB</td></tr>" in text


def test_how_far_updates_lagged_is_in_a_table() -> None:
    text = html_report.page(made_up.report(lags=made_up.lags()))
    plain = re.sub(r' data-of="[^"]*"', "", text)
    assert "<tr><td>layers.0</td><td>1</td><td>2</td><td>2</td><td>1</td></tr>" in plain
    assert "<tr><td>all units</td><td>6</td><td>6</td><td>12</td><td>1</td></tr>" in plain
    assert "&lt;b&gt;head" in text[text.index("update waits") :]
    assert "update waits" not in html_report.page(made_up.report())


def test_without_a_plan_it_says_so() -> None:
    page = Page(html_report.page(made_up.bare_report()))
    assert "svg" not in page.tags
    assert "Nothing to show: there is no plan." in page.words
    assert set(made_up.UNITS) <= set(page.words)


def test_steps_without_a_plan_have_figures() -> None:
    planless = made_up.report(
        plan=None, trace=None, simulation=None, planned=[], peaks={}, predicted_seconds=None,
        bound_seconds=None, percent_of_bound=None,
    )  # fmt: skip
    page = Page(html_report.page(planless))
    assert page.tags.count("svg") == 4
    assert set(made_up.UNITS) <= set(page.words)


def test_a_large_model_is_drawn_too() -> None:
    units = [f"layers.{i}" for i in range(2000)]
    order = [*range(2000), *reversed(range(2000))]
    uses = [UseSpan(u, i >= 2000, i / 4000, i / 4000, (i + 1) / 4000) for i, u in enumerate(order)]
    record = made_up.record(uses=uses, units=units)
    planned = [PlannedRow(unit, "keep", 1, "host", "host", "ssd", False) for unit in units]
    text = html_report.page(made_up.report(trace=None, planned=planned, records=[record]))
    assert len(text) < 8 << 20
    assert "<td>layers.1999</td>" in text


def test_what_a_tier_holds_grows_by_what_is_swapped() -> None:
    held = held_by_tier(made_up.plan(), made_up.trace())
    mib = made_up.PAGE
    assert held["host"] == [23 * mib] * 8
    assert held["ssd"] == [11 * mib] + [14 * mib] * 6 + [11 * mib]
    assert held["device"] == made_up.plan().device_curve


def test_moments_are_measured_where_the_step_is_the_traced_one() -> None:
    trace, record = made_up.trace(), made_up.record()
    measured = moments(None, record)
    assert measured[1] == (1, False, pytest.approx(0.14), pytest.approx(0.24))
    assert moments(trace, record) == measured
    lacking = moments(trace, made_up.record(uses=record.uses[:-1]))
    assert lacking[:-1] == measured[:-1]
    assert lacking[-1] == (0, True, measured[-2][3], measured[-2][3])


def test_moments_are_traced_where_the_step_is_another() -> None:
    trace, record = made_up.trace(), made_up.record()
    other = made_up.record(uses=record.uses[:3])
    assert moments(trace, other)[1] == (1, False, pytest.approx(0.1), pytest.approx(0.2))
    assert moments(trace, None) == moments(trace, other)
    assert moments(None, None) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made_up.report().save(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_the_command_writes_both(saved: Path, text: str) -> None:
    page, trace = saved.with_suffix(".html"), saved.with_name("trace.json")
    assert cli.main(["report", "--html", str(page), "--perfetto", str(trace), str(saved)]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_command_prints_a_report(saved: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["report", str(saved)]) == 0
    assert capsys.readouterr().out.strip() == str(Report.load(saved))


def test_the_command_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["report", str(tmp_path / "none.json")]) == 1
    made_up.bare_report().save(tmp_path / "bare.json")
    trace = str(tmp_path / "trace.json")
    assert cli.main(["report", "--perfetto", trace, str(tmp_path / "bare.json")]) == 1
    assert "no step was recorded" in capsys.readouterr().err
