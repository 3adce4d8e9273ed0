"""Keeps what comes of the parts of a run, at once: a machine may be taken away in the middle.

In the folder of results: a file of figures for each bench, written line by line; run.json, which
says how every part went, in this run and in earlier ones; earlier/, figures that were taken again.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .parts import Part
from .running import Result


class Keeper:
    """`key`: results of runs with another one are kept, and taken again."""

    def __init__(self, facts: Mapping[str, Any], key: str, results: Path, logs: Path) -> None:
        self.facts = facts
        self.key = key
        self.results = results
        self.logs = logs
        self.done: list[dict[str, Any]] = []  # of all runs, the oldest first

    def begin(self) -> None:
        """Makes the folders, and reads what earlier runs left there."""
        for folder in (self.logs, self.results):
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.done = json.loads((self.results / "run.json").read_text())["parts"]

    def run_before(self) -> dict[str, bool]:
        """Parts that came to an end with the same sources, and whether they went well."""
        ends = {"ok": True, "failed": False, "too slow": False}
        return {
            result["part"]: ends[result["status"]]
            for result in self.done
            if result["status"] in ends and result.get("key") == self.key
        }

    def make_way(self, part: Part) -> None:
        """Keeps the earlier figures of a part that is about to take new ones."""
        if part.figures is None or not part.figures.exists():
            return
        folder = self.results / "earlier"
        folder.mkdir(exist_ok=True)
        number = sum(1 for _ in folder.glob(f"{part.name}-*.jsonl")) + 1
        part.figures.rename(folder / f"{part.name}-{number}.jsonl")

    def keep(self, result: Result) -> None:
        """Says how a part went, here and in run.json."""
        print(row(result), flush=True)
        if result.status not in ("done before", "failed before"):
            self.done.append({**asdict(result), "key": self.key})
        summary = {"machine": self.facts, "parts": self.done}
        part = self.results / ".run.json.part"
        part.write_text(json.dumps(summary, indent=1) + "\n")
        os.replace(part, self.results / "run.json")

    def tell(self, went: Sequence[Result]) -> None:
        """The summary."""
        print()
        for line in (*map(row, went), *figure_lines(self.results)):
            print(line)
        print(f"figures: {self.results}\nlogs: {self.logs}")


def row(result: Result) -> str:
    """A part, in a line."""
    return f"{result.status:11} {result.seconds:7.0f} s  {result.part}  {result.note}".rstrip()


def figure_lines(results: Path) -> Iterable[str]:
    """Every figure that has a target, beside it."""
    for path in sorted(results.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                figure = json.loads(line)
            except ValueError:  # half a line: it was cut off there
                continue
            if figure["target"] is None:
                continue
            lower = figure["better"] == "lower"
            over, target = figure["value"], figure["target"]
            reached = over <= target if lower else over >= target
            yield (
                f"{'reached' if reached else 'missed':9} {figure['bench']} {figure['metric']}: "
                f"{over:.4g} {figure['unit']}, {'at most' if lower else 'at least'} {target:g}"
            )
