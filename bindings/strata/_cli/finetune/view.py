"""What a person sees of a run: a progress bar on a terminal, lines elsewhere; what it says at its
beginning and at its end, beside what plain PyTorch would have needed.

with make_view(steps=100, start=0, plain=False) as view:
    view.note(opening(state, choice, data))
    view.step(StepFigures(...))
summary(state, metrics, needs, tiers, output, "llama-110m")
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..._config.configure import tier_budgets
from ..._config.sizes import UNITS, format_duration, format_number, format_size
from ..._report.reports import make_report
from ..._runtime.wrapped import Wrapped
from ..._torch_compat import FakeTensorMode

if TYPE_CHECKING:
    from ..models import Choice
    from .files import Data
    from .metrics import Metrics

LOG_SECONDS = 10.0  # between log lines, but for the first and the last step
LONG_SECONDS = 86400  # from here on, nobody counts minutes


@dataclass(frozen=True)
class StepFigures:
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


class LogView(AbstractContextManager["LogView"]):
    """Plain lines, for files and pipes."""

    def __init__(self, steps: int, start: int, budgets: dict[str, int]) -> None:
        """`start`: steps that an earlier run made."""
        self._steps = steps
        self._start = start
        self._budgets = budgets
        self._began = time.monotonic()
        self._logged = float("-inf")

    def step(self, record: StepFigures) -> None:
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

    def step(self, record: StepFigures) -> None:
        """Moves the bar."""
        self._progress.tiers = tiers_text(record, self._budgets)
        speed = format_number(record.tokens_per_second)
        figures = f"loss [bold]{record.loss:.4f}[/]  {speed} tokens/s"
        self._progress.update(self._task, completed=record.step, figures=figures)

    def note(self, text: str) -> None:
        """Prints it above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> BarView:
        """Starts drawing."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar as it is and gives the terminal back."""
        self._progress.stop()


View = LogView | BarView


def make_view(steps: int, start: int, budgets: dict[str, int], plain: bool) -> View:
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


def tiers_text(record: StepFigures, budgets: dict[str, int]) -> str:
    """What each tier holds, of its budget, in the unit of the budget: device 48/64 MiB."""
    used = {"device": record.device_bytes, "host": record.host_bytes, "ssd": record.ssd_bytes}
    parts = []
    for tier, budget in budgets.items():
        if budget:
            number, unit = format_size(budget).split()
            digits = 1 if UNITS[unit] > 2**20 else 0
            held = used[tier] / UNITS[unit]
            parts.append(f"{tier} {held:.{digits}f}/{float(number):.{digits}f} {unit}")
    return "  ".join(parts)


# float32 parameter 4, gradient 4, and the two moments of AdamW 4 + 4
PLAIN_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class PlainNeeds:
    """The memory of a plain PyTorch step. `activation_bytes`: saved for backward, in float32."""

    parameters: int
    activation_bytes: int | None

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and moments."""
        return self.parameters * PLAIN_BYTES_PER_PARAMETER

    def __str__(self) -> str:
        """The sum, and what it is made of."""
        total = format_size(self.state_bytes + (self.activation_bytes or 0))
        state = (
            f"{PLAIN_BYTES_PER_PARAMETER} bytes a parameter (float32 weight, gradient, two "
            f"moments) = {format_size(self.state_bytes)}"
        )
        if self.activation_bytes is None:
            return f"{total} in one memory, without activations: {state}"
        saved = format_size(self.activation_bytes)
        return f"{total} in one memory: {state}, and {saved} of float32 activations for one batch"


def plain_needs(choice: Choice, batch: int, sequence: int) -> PlainNeeds:
    """Counted in a forward pass over fake tensors, which have shapes and no values."""
    with FakeTensorMode():
        model = choice.build("cpu")
        parameters = list(model.parameters())
        known = {p.untyped_storage()._cdata for p in parameters}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        tokens = torch.zeros((batch, sequence), dtype=torch.int64)
        count = sum(p.numel() for p in parameters)
        try:
            # The graph keeps every saved storage alive, so that no address counts twice.
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                graph = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        except (RuntimeError, NotImplementedError):  # the forward pass asks for a value
            return PlainNeeds(count, None)
        del graph
        return PlainNeeds(count, sum(saved.values()))


def perplexity(loss: float) -> str:
    """For people: exp(loss)."""
    return f"{math.exp(loss):.1f}" if loss < 20 else f"e^{loss:.1f}"


def opening(state: Wrapped, choice: Choice, data: Data) -> str:
    """One line on what is about to be trained, on what, and where it lives."""
    count = sum(spec["numel"] for spec in state.config["params"])
    stats = state.session.stats()
    tiers = ", ".join(
        f"{tier} {format_size(size)}" for tier, size in tier_budgets(state.config).items() if size
    )
    tokens = (data.training.count + data.held_out.count) * data.training.sequence
    return (
        f"{choice.name}: {count / 1e6:.1f} M parameters "
        f"({'from ' + str(choice.weights) if choice.weights else 'fresh'}), "
        f"{data.documents} documents, {tokens / 1e6:.2f} M tokens; {tiers}; "
        f"page {format_size(state.session.plan['page_bytes'])}"
        + (f", {stats['io_engine']} I/O" if stats["io_engine"] else "")
    )


def summary(
    state: Wrapped,
    metrics: Metrics,
    needs: PlainNeeds,
    tiers: dict[str, int],
    output: Path,
    name: str,
) -> None:
    """Prints the table at the end of a run."""
    steps, evaluations = metrics.steps, metrics.evaluations
    first, last = evaluations[0], evaluations[-1]
    rates = [record["tokens_per_second"] for record in steps]
    stats = state.session.stats()
    peaks = {tier: max(record[f"{tier}_bytes"] for record in steps) for tier in tiers}
    peaks["device"] = max(peaks["device"], stats["device_bytes_peak"])
    size = needs.parameters * getattr(torch, state.config["params"][0]["dtype"]).itemsize
    rows = [
        (
            "held-out loss",
            f"{first['held_out_loss']:.4f} → {last['held_out_loss']:.4f} (perplexity "
            f"{perplexity(first['held_out_loss'])} → {perplexity(last['held_out_loss'])})",
        ),
        ("steps", f"{len(steps)} in {format_duration(steps[-1]['seconds'])}"),
        ("speed", f"{format_number(sorted(rates)[len(rates) // 2])} tokens/s (median step)"),
        ("parameters", f"{needs.parameters / 1e6:.1f} M, {format_size(size)} as computed with"),
    ]
    if limited := make_report(state).limited:
        rows.append(("speed is", limited))
    if state.steps_skipped:
        rows.append(("skipped steps", f"{state.steps_skipped}, their gradients were not finite"))
    rows += [
        (f"{tier} memory", f"{format_size(peaks[tier])} of {format_size(budget)}")
        for tier, budget in tiers.items()
        if budget
    ]
    rows += [
        ("plain PyTorch", str(needs)),
        ("model", str(output / "model")),
        ("picture", str(output / "progress.png")),
        ("report", f"strata report --html report.html {output / 'report.json'}"),
    ]
    table = Table(title=name, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table, markup=False)
