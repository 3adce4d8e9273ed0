"""What every bench shares: figures, the machine they were taken on, and sides that take turns."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
GIB = 1 << 30


class BenchError(RuntimeError):
    """The bench cannot run here; the message says what is missing."""


@dataclass(frozen=True)
class Figure:
    """One measured number, beside what it should reach and what physics allows."""

    bench: str
    metric: str
    value: float
    unit: str
    target: float | None = None
    bound: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


@dataclass(frozen=True)
class Context:
    """What the command line asked for."""

    quick: bool
    seed: int
    rounds: int
    ssd_path: Path
    device: str = "host"  # or "cuda:N"; for benches that take either
    resume: Path | None = None  # where a long search keeps what it found, for the next run

    def say(self, text: str) -> None:
        """Tells a waiting person what is going on, away from the figures on stdout."""
        print(f"  {text}", file=sys.stderr, flush=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder on the measured disk, gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=self.ssd_path) as folder:
            yield Path(folder)


@cache
def machine() -> str:
    """Processor, cores, memory, kernel and PyTorch, in one line."""
    import torch

    names = [platform.processor() or platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return " · ".join(
        [
            *names[:1],
            f"{len(os.sched_getaffinity(0))} cores",
            f"{memory:.0f} GiB",
            accelerator,
            f"Linux {platform.release()}",
            f"torch {torch.__version__}",
        ]
    )


@cache
def commit() -> str:
    """The commit measured, with a + where the tree differs from it; outside git what STRATA_COMMIT
    says, or "unknown"."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("STRATA_COMMIT", "unknown")


def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Calls every side once a round, each round beginning with another one, and keeps what they
    return (seconds). What disturbs the machine for a while so disturbs all sides alike.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(sides[name]())
        latest = ", ".join(f"{name} {values[-1]:.4g} s" for name, values in taken.items())
        say(f"round {turn + 1} of {rounds}: {latest}")
    return taken


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of each round, which a slow round cannot tilt."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def share_of_best(ours: Sequence[float], *others: Sequence[float]) -> float:
    """What our rates reach of the bound, in percent: the median over rounds. The bound of a round
    is the best rate of any side in it. What was reached can be reached: no share is above 100.
    """
    rounds = zip(ours, *others, strict=True)
    return statistics.median(100 * rates[0] / max(rates) for rates in rounds)


def seconds_of(work: Callable[[], object]) -> float:
    """The wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def as_json(figure: Figure, seed: int) -> str:
    """One JSON line that stands on its own."""
    return json.dumps({**asdict(figure), "machine": machine(), "commit": commit(), "seed": seed})


def print_table(figures: Sequence[Figure], seed: int, console: Console) -> None:
    """The figures for people: value, target and bound side by side."""
    table = Table(title=f"{machine()}\ncommit {commit()}, seed {seed}", title_justify="left")
    for heading in ("bench", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "unit", "target", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    marks = {None: "", True: "[green]reached", False: "[red]missed"}
    for figure in figures:
        sign = "≤" if figure.better == "lower" else "≥"
        table.add_row(
            figure.bench,
            figure.metric,
            f"{figure.value:.4g}",
            figure.unit,
            "" if figure.target is None else f"{sign} {figure.target:g}",
            "" if figure.bound is None else f"{figure.bound:.4g}",
            marks[figure.reached],
        )
    console.print(table)
