"""Keeps what comes of the parts of a run, at once: a machine may be taken away in the middle.

In the folder of results: a file of figures for each bench, written line by line; run.json, which
says how every part went, in this run and in earlier ones; earlier/, figures that were taken again.
The archive has all of it and the logs; it is renewed behind every part and every half minute.
"""

import contextlib
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .parts import Part
from .running import Result

PACK_SECONDS = 30


class Keeper:
    """`key`: results of runs with another one are kept, and taken again."""

    def __init__(
        self, facts: Mapping[str, Any], key: str, results: Path, logs: Path, archive: Path
    ) -> None:
        self.facts = facts
        self.key = key
        self.results = results
        self.logs = logs
        self.archive = archive
        self.done: list[dict[str, Any]] = []  # of all runs, the oldest first
        self._packed = 0.0

    def begin(self) -> None:
        """Makes the folders, and reads what earlier runs left there."""
        for folder in (self.logs, self.results, self.archive.parent):
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
        """Says how a part went, and packs everything anew."""
        print(row(result), flush=True)
        if result.status not in ("done before", "failed before"):
            self.done.append({**asdict(result), "key": self.key})
        summary = {"machine": self.facts, "parts": self.done}
        with whole(self.results / "run.json") as path:
            path.write_text(json.dumps(summary, indent=1) + "\n")
        self.pack()

    def tick(self) -> None:
        """Packs, where that is some time ago."""
        if time.monotonic() - self._packed > PACK_SECONDS:
            self.pack()

    def pack(self) -> None:
        """Renews the archive. Where it cannot, the run goes on: the files themselves are there."""
        self._packed = time.monotonic()
        try:
            self._pack()
        except OSError as error:
            print(f"{self.archive} is not renewed: {error}", file=sys.stderr, flush=True)

    def _pack(self) -> None:
        inside = {self.archive.name, self.logs.name}

        def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if inside & set(Path(member.name).parts[1:2]) else member

        with whole(self.archive) as path, tarfile.open(path, "w:gz") as packed:
            packed.add(self.results, self.results.name, filter=chosen)
            packed.add(self.logs, f"{self.results.name}/logs")

    def tell(self, went: Sequence[Result]) -> None:
        """The summary."""
        print()
        for line in (*map(row, went), *figure_lines(self.results)):
            print(line)
        print(f"figures: {self.results}\neverything: {self.archive}")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file that takes the place of another one when it is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


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
