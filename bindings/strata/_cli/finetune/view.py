"""What a person sees of a run: a progress bar on a terminal, lines elsewhere; what it says at its
beginning and at its end, beside what plain PyTorch would have needed.

Trainer(callbacks=[Bar(budgets)])      # or Lines(budgets)
note(opening(state, choice, data))
summary(state, history, needs, tiers, output, "llama-110m")
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from ..._config.budgets import tier_budgets
from ..._config.sizes import UNITS, format_duration, format_number, format_size
from ..._report.report_text import folded
from ..._report.reports import make_report
from ..._torch_compat import FakeTensorMode
from ..lora import add_adapters
from ..models import put_on_host

if TYPE_CHECKING:
    from ..._runtime.wrapped import Wrapped
    from ..models import Choice
    from .data import Data
    from .options import Options

LOG_SECONDS = 10.0  # between log lines, except for the first and the last step
LABEL_COLUMNS = 15  # of the table at the end


Record = dict[str, Any]
"""What the Trainer logs of a step, with what the mixin and trainer.py add."""


def note(text: str) -> None:
    """Prints it, above a bar where there is one."""
    with tqdm.external_write_mode():
        print(text, flush=True)


class Lines(TrainerCallback):
    """Plain lines, for files and pipes. The first rank prints."""

    def __init__(self, budgets: dict[str, int]) -> None:
        self._budgets = budgets
        self._logged = float("-inf")

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the Trainer."""
        self._start, self._began = state.global_step, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Called by the Trainer. Prints a line every now and then."""
        if "loss" not in logs or not state.is_world_process_zero:
            return
        now, step, steps = time.monotonic(), state.global_step, state.max_steps
        if step not in (self._start + 1, steps) and now - self._logged < LOG_SECONDS:
            return
        self._logged = now
        left = (now - self._began) / (step - self._start) * (steps - step)
        note(
            f"step {step}/{steps}  {_figures(logs)}  lr {logs['learning_rate']:.1e}  "
            f"{tiers_text(logs, self._budgets)}  {tqdm.format_interval(left)} left"
        )

    def close(self) -> None:
        """Nothing to undo."""


class Bar(ProgressCallback):
    """The Trainer's progress bar, with the figures of a step, and a line on the tiers below it, so
    that both fit into 80 columns."""

    def __init__(self, budgets: dict[str, int]) -> None:
        super().__init__()
        self._budgets = budgets
        self._tiers: Any = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Called by the Trainer. Moves the bar."""
        if "loss" not in logs or self.training_bar is None:
            return
        if self._tiers is None:
            self._tiers = tqdm(bar_format="{desc}", position=1, dynamic_ncols=True)
        self.training_bar.set_postfix_str(_figures(logs))
        self._tiers.set_description_str(tiers_text(logs, self._budgets))

    def close(self) -> None:
        """Leaves the bar as it is, and what follows gets a line of its own."""
        for bar in (self.training_bar, self._tiers):
            if bar is not None:
                bar.close()


def _figures(record: Record) -> str:
    """Loss and tokens a second, and how near that is to what no plan could be faster than."""
    share = record.get("strata_percent_of_bound")
    bound = "" if share is None else f" ({share:.0f} % of the bound)"
    speed = f"{format_number(record['tokens_per_second'])} tokens/s"
    return f"loss {record['loss']:.4f}  {speed}{bound}"


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
        f"{data.facts['count']} documents or records, {tokens / 1e6:.2f} M tokens; {tiers}; "
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
    print(f"\n{name}")
    columns = shutil.get_terminal_size().columns
    for label, says in rows:
        lines = folded(f"{label:<{LABEL_COLUMNS}}{says}", columns, LABEL_COLUMNS)
        print("\n".join(lines))
