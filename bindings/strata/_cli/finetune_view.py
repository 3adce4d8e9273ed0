"""What a person sees of a run: a progress bar on a terminal, lines elsewhere, a table at the end.

with make_view(steps=100, start=0, plain=False) as view:
    view.step(StepRecord(...))
    view.note("checkpoint saved")
print_table("llama-110m", rows)
"""

import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .._config.sizes import format_duration, format_number, format_size

LOG_SECONDS = 10.0  # between log lines, but for the first and the last step
LONG_SECONDS = 86400  # from here on, nobody counts minutes


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as metrics.jsonl has it. `seconds`: of training so far, all runs."""

    step: int
    loss: float
    lr: float
    norm: float
    tokens_per_second: float
    seconds: float
    device_bytes: int
    host_bytes: int
    ssd_bytes: int


class View(Protocol):
    """Where a run tells how it goes."""

    def step(self, record: StepRecord) -> None:
        """A step has ended."""

    def note(self, text: str) -> None:
        """Something happened beside the steps."""


class LogView(AbstractContextManager["LogView"]):
    """Plain lines, for files and pipes."""

    def __init__(self, steps: int, start: int, budgets: dict[str, int]) -> None:
        """`start`: steps that an earlier run made."""
        self._steps = steps
        self._start = start
        self._budgets = budgets
        self._began = time.monotonic()
        self._logged = float("-inf")

    def step(self, record: StepRecord) -> None:
        """Prints a line every now and then."""
        now = time.monotonic()
        ends = record.step in (self._start + 1, self._steps)
        if not ends and now - self._logged < LOG_SECONDS:
            return
        self._logged = now
        each = (now - self._began) / (record.step - self._start)
        left = each * (self._steps - record.step)
        print(
            f"step {record.step}/{self._steps}  loss {record.loss:.4f}  lr {record.lr:.1e}  "
            f"{format_number(record.tokens_per_second)} tokens/s  "
            f"{tiers_text(record, self._budgets)}  {_left(left)} left",
            flush=True,
        )

    def note(self, text: str) -> None:
        """Prints it."""
        print(text, flush=True)

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


class _BarAndTiers(Progress):
    """A progress bar with a line on the tiers below it, so that both fit into 80 columns."""

    tiers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for what to draw."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.tiers)


class BarView(AbstractContextManager["BarView"]):
    """A live progress bar on a terminal."""

    def __init__(self, steps: int, start: int, budgets: dict[str, int]) -> None:
        """`start`: steps that an earlier run made."""
        self._budgets = budgets
        self._progress = _BarAndTiers(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(),
        )
        self._task = self._progress.add_task("steps", total=steps, completed=start, figures="")

    def step(self, record: StepRecord) -> None:
        """Moves the bar."""
        self._progress.tiers = tiers_text(record, self._budgets)
        speed = format_number(record.tokens_per_second)
        figures = f"loss [bold]{record.loss:.4f}[/]  {speed} tokens/s"
        self._progress.update(self._task, completed=record.step, figures=figures)

    def note(self, text: str) -> None:
        """Prints it above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> "BarView":
        """Starts drawing."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar as it is and gives the terminal back."""
        self._progress.stop()


def make_view(steps: int, start: int, budgets: dict[str, int], plain: bool) -> LogView | BarView:
    """A bar on a terminal, unless `plain` lines are asked for."""
    kind = LogView if plain or not sys.stdout.isatty() else BarView
    return kind(steps, start, budgets)


def _left(seconds: float) -> str:
    """12:05 is minutes and seconds, and 2:03:20 has hours ahead of them."""
    if seconds >= LONG_SECONDS:
        return format_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def tiers_text(record: StepRecord, budgets: dict[str, int]) -> str:
    """What each tier holds, of its budget, in the unit of the budget: device 48/64 MiB."""
    used = {"device": record.device_bytes, "host": record.host_bytes, "ssd": record.ssd_bytes}
    parts = []
    for tier, budget in budgets.items():
        if budget:
            number, unit = format_size(budget).split()
            scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
            digits = 1 if scale > 2**20 else 0
            parts.append(
                f"{tier} {used[tier] / scale:.{digits}f}/{float(number):.{digits}f} {unit}"
            )
    return "  ".join(parts)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """The summary at the end of a run."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console(highlight=False).print(table, markup=False)
