"""What README.md and the pages in docs/ show: programs run, commands and links are there, and the
examples of public docstrings do what they say."""

import doctest
import functools
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages
import pytest
import strata
import torch
from strata._cli.main import COMMANDS

PAGES = pages.all_pages()
SHORT = {"README.md"}  # ./dev check runs all
SHOWN = re.compile(r"^```(?:console|sh|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = [
    *(f"strata.{name}" for name in strata.__all__ if callable(getattr(strata, name))),
    *(f"strata.nn.{name}" for name in strata.nn.__all__),
]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(page: Path) -> list[str]:
    """The command lines of a page: what blocks for a terminal show, lines that go on joined."""
    joined = "\n".join(SHOWN.findall(text_of(page))).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return [line.removeprefix("./dev run ") for line in lines]


@functools.cache
def help_of(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "strata", command, "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(PAGES) > 5
    assert pages.blocks(pages.ROOT / "README.md", "python")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=pages.name_of(p), marks=[pytest.mark.thorough] * (p.name not in SHORT))
        for p in PAGES
        if pages.blocks(p, "python") and not pages.needs_loops(p)
    ],
)
def test_programs_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    output = pages.run(page, tmp_path)
    assert pages.unprinted(page, output) == [], output
    for reached in re.findall(r"(\d+) % of it reached", output):
        assert 0 < int(reached) <= 100, output
    if page.name == "README.md":  # it shows a report
        assert "limited by " in output
        assert "% of it reached" in output


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Anchors are looked at when the pages are built."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text_of(page))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_commands_are_there_with_their_options(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line, comments=True) if line.startswith("strata ") else []
        if len(words) < 2 or words[1] == "COMMAND":
            continue
        if words[1].startswith("--"):
            assert words[1] == "--version"
            continue
        assert words[1] in COMMANDS, line
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        known = set(
            re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"-\n\s+", "-", help_of(words[1])))
        )
        assert options <= known, line


def test_commands_of_dev_are_there() -> None:
    text = (pages.ROOT / "dev").read_text()
    named = {name for page in PAGES for name in re.findall(r"\./dev ([a-z]+)", text_of(page))}
    assert {"demo", "test", "docs"} <= named
    assert [name for name in sorted(named) if not re.search(rf"^  {name}[ )|]", text, re.M)] == []


def test_pictures_are_what_their_program_draws() -> None:
    folder = pages.ROOT / "docs" / "pictures"
    drawn = runpy.run_path(str(folder / "draw.py"))["PICTURES"]
    assert {path.stem for path in folder.glob("*.svg")} == drawn.keys()
    for name, draw in drawn.items():
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == str(draw()), name


@pytest.mark.thorough
def test_what_is_not_printed_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint('took 3 ms,', 'and so on')\n```\n"
        "```text\ntook 12 s,\n    and ...\n```\n```text\ntook 3 hours\n```\n"
    )
    output = pages.run(page, tmp_path)
    assert pages.unprinted(page, output) == ["took 3 hours\n"]
    page.write_text("```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match=r"page.md\", line 2"):
        pages.run(page, tmp_path)


@pytest.mark.parametrize(
    ("html", "breach"),
    [
        ('<a href="other.html#there">', ""),
        ('<a href="https://example.org/">', ""),
        ('<a href="missing.html">', "leads nowhere"),
        ('<a href="other.html#gone">', "no such place"),
        ('<a href="#gone">', "no such place"),
        ('<script src="https://example.org/a.js">', "from elsewhere"),
        ('<link href="//example.org/a.css">', "from elsewhere"),
    ],
)
def test_built_pages_are_checked(tmp_path: Path, html: str, breach: str) -> None:
    built = runpy.run_path(str(pages.ROOT / "docs" / "built.py"))
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "other.html").write_text('<p id="there">')
    found = list(built["breaches"](tmp_path))
    assert [breach in one for one in found] == [True] * bool(breach), found


def members(name: str) -> list[Any]:
    """A public object and, of a class, what of it is public and documented there."""
    thing = functools.reduce(getattr, name.split(".")[1:], strata)
    found = [thing]
    if inspect.isclass(thing):
        found += [m for n, m in vars(thing).items() if not n.startswith("_") and callable(m)]
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strata._config.device.why_not", lambda name: "budgets are for the host")
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    told = io.StringIO()
    for thing in members(name):
        for test in finder.find(
            thing, name, module=False, globs={"strata": strata, "torch": torch}
        ):
            runner.run(test, out=told.write)
    assert runner.failures == 0, told.getvalue()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name: str) -> None:
    """In their docstrings, or in a program of the reference."""
    thing = functools.reduce(getattr, name.split(".")[1:], strata)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return
    programs = pages.blocks(pages.ROOT / "docs" / "reference" / "python.md", "python")
    shown = any(re.search(rf"\b{re.escape(name)}\b", text) for _, text in programs)
    assert shown or ">>> " in (inspect.getdoc(thing) or ""), name
