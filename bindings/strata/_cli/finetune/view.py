"""What a person sees of a run: a progress bar on a terminal, lines elsewhere; what it says at its
beginning and at its end, beside what plain PyTorch would have needed.

with make_view(steps=100, start=0, plain=False) as view:
    view.note(opening(state, choice, data))
    view.step({"step": 1, "loss": 5.1, ...})
summary(state, history, needs, tiers, output, "llama-110m")
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..._config.budgets import tier_budgets
from ..._config.sizes import UNITS, format_duration, format_number, format_size
from ..._report.reports import make_report
from ..._runtime.wrapped import Wrapped
from ..._torch_compat import FakeTensorMode
from ..lora import add_adapters
from ..models import put_on_host

if TYPE_CHECKING:
    from ..models import Choice
    from .data import Data
    from .options import Options

LOG_SECONDS = 10.0  # between log lines, but for the first and the last step
LONG_SECONDS = 86400  # from here on, nobody counts minutes


Record = dict[str, Any]
"""Of a step: what the Trainer logs, with what the mixin and trainer.py add."""


class LogView(AbstractContextManager["LogView"]):
    """Plain lines, for files and pipes."""

    def __init__(self, steps: int, start: int, budgets: dict[str, int]) -> None:
        """`start`: steps that an earlier run made."""
        self._steps = steps
        self._start = start
        self._budgets = budgets
        self._began = time.monotonic()
        self._logged = float("-inf")

    def step(self, record: Record) -> None:
        """Prints a line every now and then."""
        now, step = time.monotonic(), record["step"]
        ends = step in (self._start + 1, self._steps)
        if not ends and now - self._logged < LOG_SECONDS:
            return
        self._logged = now
        left = (now - self._began) / (step - self._start) * (self._steps - step)
        print(
            f"step {step}/{self._steps}  loss {record['loss']:.4f}  "
            f"lr {record['learning_rate']:.1e}  {_speed(record)}  "
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

    def step(self, record: Record) -> None:
        """Moves the bar."""
        self._progress.tiers = tiers_text(record, self._budgets)
        figures = f"loss [bold]{record['loss']:.4f}[/]  {_speed(record)}"
        self._progress.update(self._task, completed=record["step"], figures=figures)

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


class NoView(AbstractContextManager["NoView"]):
    """Of all ranks but the first, which shows what all of them do."""

    def step(self, record: Record) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


View = LogView | BarView | NoView


def make_view(
    steps: int, start: int, budgets: dict[str, int], plain: bool, leads: bool = True
) -> View:
    """A bar on a terminal, unless `plain` lines are asked for. `leads`: this rank shows them."""
    if not leads:
        return NoView()
    kind = LogView if plain or not sys.stdout.isatty() else BarView
    return kind(steps, start, budgets)


def _left(seconds: float) -> str:
    """12:05 is minutes and seconds, and 2:03:20 has hours ahead of them."""
    if seconds >= LONG_SECONDS:
        return format_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _speed(record: Record) -> str:
    """Tokens a second, and how near that is to what no plan could be faster than."""
    share = record.get("strata_percent_of_bound")
    bound = "" if share is None else f" ({share:.0f} % of the bound)"
    return f"{format_number(record['tokens_per_second'])} tokens/s{bound}"


def tiers_text(record: Record, budgets: dict[str, int]) -> str:
    """What each tier holds, of its budget, in the unit of the budget: host 48/64 MiB. Of the device
    the peak of a step, with PyTorch's own memory, once it is known, and what of it is pages."""
    parts = []
    for tier, budget in budgets.items():
        if budget:
            number, unit = format_size(budget).split()
            digits = 1 if UNITS[unit] > 2**20 else 0
            pages = record[f"strata_{tier}_gib"] * 2**30 / UNITS[unit]
            held = record.get(f"strata_{tier}_peak_gib", 0.0) * 2**30 / UNITS[unit]
            of = f"{max(pages, held):.{digits}f}/{float(number):.{digits}f} {unit}"
            parts.append(f"{tier} {of}" + (f" (pages {pages:.{digits}f})" if held else ""))
    return "  ".join(parts)


# float32 parameter 4; where it trains, gradient 4, and the two moments of AdamW 4 + 4
PLAIN_BYTES, TRAINED_BYTES = 4, 12


@dataclass(frozen=True)
class PlainNeeds:
    """The memory of a plain PyTorch step. `activation_bytes`: saved for backward, in float32."""

    parameters: int
    trained: int
    activation_bytes: int | None

    def __str__(self) -> str:
        """The sum, and what it is made of."""
        state_bytes = PLAIN_BYTES * self.parameters + TRAINED_BYTES * self.trained
        total = format_size(state_bytes + (self.activation_bytes or 0))
        state = (
            f"{PLAIN_BYTES} bytes a float32 parameter, and {TRAINED_BYTES} for gradient and two "
            f"moments of a trained one = {format_size(state_bytes)}"
        )
        if self.activation_bytes is None:
            return f"{total} in one memory, without activations: {state}"
        saved = format_size(self.activation_bytes)
        return f"{total} in one memory: {state}, and {saved} of float32 activations for one batch"


def plain_needs(choice: Choice, options: Options) -> PlainNeeds:
    """Counted in a forward pass over fake tensors, which have shapes and no values."""
    model: Any = choice.build()
    if options.start.lora:
        add_adapters(model, options.start.lora)
    with FakeTensorMode():
        put_on_host(model)
        parameters = list(model.parameters())
        known = {p.untyped_storage()._cdata for p in parameters}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        tokens = torch.zeros((options.training.batch, options.start.sequence), dtype=torch.int64)
        count = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        try:
            # The graph keeps every saved storage alive, so that no address counts twice.
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                graph = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        except (RuntimeError, NotImplementedError):  # the forward pass asks for a value
            return PlainNeeds(count, trained, None)
        del graph
        return PlainNeeds(count, trained, sum(saved.values()))


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
    if state.ranks is not None:
        tiers += f" for each of {state.ranks.count} ranks"
    windows = len(data.training) + len(data.held_out)
    tokens = windows * len(data.training[0]["input_ids"])
    return (
        f"{choice.name}: {count / 1e6:.1f} M parameters "
        f"({'from ' + str(choice.weights) if choice.weights else 'fresh'}), "
        f"{data.count} documents or records, {tokens / 1e6:.2f} M tokens; {tiers}; "
        f"page {format_size(state.session.plan['page_bytes'])}"
        + (f", {stats['io_engine']} I/O" if stats["io_engine"] else "")
    )


def summary(
    state: Wrapped,
    history: list[Record],
    needs: PlainNeeds,
    tiers: dict[str, int],
    output: Path,
    name: str,
) -> None:
    """Prints the table at the end of a run. `history`: the Trainer's logs."""
    steps = [record for record in history if "loss" in record]
    losses = [record["eval_loss"] for record in history if "eval_loss" in record]
    rates = [record["tokens_per_second"] for record in steps]
    used = make_report(state).tiers
    size = needs.parameters * getattr(torch, state.config["params"][0]["dtype"]).itemsize
    trained = "" if needs.trained == needs.parameters else f", {needs.trained / 1e6:.2f} M trained"
    rows = [
        (
            "held-out loss",
            f"{losses[0]:.4f} → {losses[-1]:.4f} (perplexity {perplexity(losses[0])} → "
            f"{perplexity(losses[-1])})",
        ),
        ("steps", f"{len(steps)} in {format_duration(steps[-1]['seconds'])}"),
        ("speed", f"{format_number(sorted(rates)[len(rates) // 2])} tokens/s (median step)"),
        (
            "parameters",
            f"{needs.parameters / 1e6:.1f} M, {format_size(size)} as computed with{trained}",
        ),
    ]
    if limited := make_report(state).limited:
        rows.append(("speed is", limited))
    if state.steps.skipped:
        rows.append(("skipped steps", f"{state.steps.skipped}, their gradients were not finite"))
    peak = state.planning.device_peak if state.planning is not None else 0
    for tier, budget in tiers.items():
        pages = format_size(used[tier].peak)
        if tier == "device" and peak:
            held = f"{format_size(peak)} of {format_size(budget)} at the peak of a step; at most "
            rows.append(("device memory", f"{held}{pages} of pages, the rest PyTorch's own"))
        elif budget:
            rows.append((f"{tier} memory", f"{pages} of {format_size(budget)}"))
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
