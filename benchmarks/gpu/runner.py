"""Builds strata with CUDA, runs every test on the GPU, takes all figures of a GPU, and packs what
came of it into one file. Uses no network, and the Python environment that there is.

    benchmarks/gpu/run                   # everything: some hours
    benchmarks/gpu/run --quick           # shows that all of it runs: no figure means anything
    benchmarks/gpu/run --dry-run         # what would be done, and what is missing

Exit status: 0 where every part went well, 1 where one did not, 2 where something is missing.
"""

import argparse
import json
import re
import shlex
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from . import needs, parts
from .parts import Result, Wishes

ROOT = Path(__file__).resolve().parents[2]
MISSING = 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment (this one)"
    )
    parser.add_argument("--gpu", type=int, help="its number, from 0 (the first one)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--skip-tests", action="store_true", help="builds and measures only")
    parser.add_argument("--dry-run", action="store_true", help="says what would be done")
    parser.add_argument(
        "--ssd-path", type=Path, default=ROOT / "build", help="folder on the disk to measure"
    )
    return parser.parse_args(arguments)


def slug(gpu: str) -> str:
    """The name of a GPU as that of a folder: "NVIDIA H200" is "h200"."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word != "nvidia") or "gpu"


def main(arguments: Sequence[str]) -> int:
    """Looks, and runs everything unless something is missing."""
    options = parse(arguments)
    env = needs.environment(ROOT, options.python, options.gpu)
    found = needs.look(ROOT, options.python, env, not options.skip_tests)
    work = ROOT / "build" / "gpu"
    results = work / "quick" if options.quick else ROOT / "benchmarks" / "results"
    results /= slug(found.gpu)
    ssd_path = options.ssd_path.absolute()
    wishes = Wishes(options.python, options.quick, not options.skip_tests, ssd_path)
    plan = parts.all_parts(ROOT, wishes, results)
    if options.dry_run:
        print_plan(plan, results)
    for sentence in found.missing:
        print(f"missing: {sentence}", file=sys.stderr)
    if options.dry_run:
        return 0
    if found.missing:
        print("nothing was built; run this again when all of it is there", file=sys.stderr)
        return MISSING
    keeper = Keeper(found, results, work / "logs", work / f"{results.name}.tar.gz")
    keeper.begin()
    ssd_path.mkdir(parents=True, exist_ok=True)
    try:
        for result in parts.run_all(plan, ROOT, env, keeper.logs):
            keeper.keep(result)
    except KeyboardInterrupt:
        print("interrupted: what was done so far is kept", file=sys.stderr)
    keeper.tell()
    return 0 if len(keeper.done) == len(plan) and keeper.all_well else 1


def print_plan(plan: Iterable[parts.Part], results: Path) -> None:
    """What would be run, ready to be run by hand."""
    for part in plan:
        variables = [f"{name}={value}" for name, value in part.variables.items()]
        print(f"{part.name} (at most {part.minutes:g} minutes):")
        print(f"  {' '.join([*variables, shlex.join(part.command)])}")
    print(f"figures: {results}")


class Keeper:
    """Keeps what came of every part, behind each: a machine may be taken away in the middle."""

    def __init__(self, found: needs.Found, results: Path, logs: Path, archive: Path) -> None:
        self.found = found
        self.results = results
        self.logs = logs
        self.archive = archive
        self.done: list[Result] = []

    def begin(self) -> None:
        """Makes the folders, and removes what an earlier run left there."""
        for folder in (self.logs, self.results):
            folder.mkdir(parents=True, exist_ok=True)
        for left in (*self.logs.glob("*.log"), *self.results.glob("*.jsonl")):
            left.unlink()

    @property
    def all_well(self) -> bool:
        """Whether no part failed."""
        return all(result.status == "ok" for result in self.done)

    def keep(self, result: Result) -> None:
        """Says how a part went, and packs everything anew."""
        self.done.append(result)
        print(row(result), flush=True)
        parts_done = [asdict(result) for result in self.done]
        summary = {"machine": self.found.facts, "parts": parts_done}
        (self.results / "run.json").write_text(json.dumps(summary, indent=1) + "\n")
        with tarfile.open(self.archive, "w:gz") as packed:
            packed.add(self.results, self.results.name)
            packed.add(self.logs, f"{self.results.name}/logs")

    def tell(self) -> None:
        """The summary."""
        print()
        for line in (*map(row, self.done), *figure_lines(self.results)):
            print(line)
        print(f"figures: {self.results}\neverything: {self.archive}")


def row(result: Result) -> str:
    """A part, in a line."""
    return f"{result.status:9} {result.seconds:7.0f} s  {result.part}  {result.note}".rstrip()


def figure_lines(results: Path) -> Iterable[str]:
    """Every figure that has a target, beside it."""
    for path in sorted(results.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            figure = json.loads(line)
            if figure["target"] is None:
                continue
            lower = figure["better"] == "lower"
            over, target = figure["value"], figure["target"]
            reached = over <= target if lower else over >= target
            yield (
                f"{'reached' if reached else 'missed':9} {figure['bench']} {figure['metric']}: "
                f"{over:.4g} {figure['unit']}, {'at most' if lower else 'at least'} {target:g}"
            )
