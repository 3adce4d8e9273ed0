"""The figures of a run, one JSON object per line, and the picture of them: loss and memory per tier
over time.

    metrics = Metrics(Path("run/metrics.jsonl"), keep=False)
    metrics.add_step(record)
    metrics.add_evaluation(step=10, seconds=63.0, loss=5.1)
    draw(metrics, budgets, Path("run/progress.png"), title="llama-110m")

A line with `loss` is a step (the fields of StepFigures), one with `held_out_loss` an evaluation.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from ..._report.html_figures import TIER_COLOURS

if TYPE_CHECKING:
    from .view import StepFigures

Record = dict[str, Any]


class Metrics:
    """Appends to a file at once, and remembers what is in it."""

    def __init__(self, path: Path, keep: bool) -> None:
        """`keep` the lines of an earlier run; a line that was cut short is dropped."""
        self._path = path
        self._records: list[Record] = []
        if keep and path.exists():
            self._records = [r for line in path.read_text().splitlines() if (r := _parse(line))]
        self._rewrite()

    @property
    def steps(self) -> list[Record]:
        """One record per step, oldest first."""
        return [record for record in self._records if "loss" in record]

    @property
    def evaluations(self) -> list[Record]:
        """One record per evaluation, oldest first."""
        return [record for record in self._records if "held_out_loss" in record]

    def add_step(self, record: StepFigures) -> None:
        """Appends a step."""
        self._append(dataclasses.asdict(record))

    def add_evaluation(self, step: int, seconds: float, loss: float) -> None:
        """Appends an evaluation made after `step` steps."""
        self._append({"step": step, "seconds": seconds, "held_out_loss": loss})

    def forget_after(self, step: int) -> None:
        """Drops what a killed run did after its last checkpoint."""
        self._records = [record for record in self._records if record["step"] <= step]
        self._rewrite()

    def _append(self, record: Record) -> None:
        self._records.append(record)
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _rewrite(self) -> None:
        self._path.write_text("".join(json.dumps(record) + "\n" for record in self._records))


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


SMOOTHING = 0.9  # of the loss: the share that the past keeps at every step


def draw(metrics: Metrics, budgets: dict[str, int], path: Path, title: str) -> None:
    """Writes a PNG. Budgets in bytes."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_loss(upper, metrics.steps, metrics.evaluations)
    _draw_memory(lower, metrics.steps, budgets)
    upper.set_title(title)
    figure.savefig(path, dpi=120)


def _draw_loss(axes: Any, steps: list[Record], evaluations: list[Record]) -> None:
    minutes = [record["seconds"] / 60 for record in steps]
    losses = [record["loss"] for record in steps]
    axes.plot(minutes, losses, color="#b0b7c3", linewidth=1, label="training loss, each step")
    axes.plot(minutes, _smooth(losses), color="#30415d", linewidth=2, label="training loss, mean")
    axes.plot(
        [record["seconds"] / 60 for record in evaluations],
        [record["held_out_loss"] for record in evaluations],
        "o-", color="#d1495b", linewidth=1.5, label="held-out loss",
    )  # fmt: skip
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(axes: Any, steps: list[Record], budgets: dict[str, int]) -> None:
    minutes = [record["seconds"] / 60 for record in steps]
    for tier, budget in budgets.items():
        used = [record[f"{tier}_bytes"] / 2**20 for record in steps]
        if not any(used):
            continue
        colour = TIER_COLOURS[tier]
        axes.plot(minutes, used, color=colour, linewidth=2, label=f"{tier}: in use")
        axes.axhline(
            budget / 2**20, color=colour, linestyle="--", linewidth=1, label=f"{tier}: budget"
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())  # 256, not 2 to the 8th
    axes.set_ylabel("memory, MiB")
    axes.set_xlabel("time of training, minutes")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize="small")


def _smooth(values: list[float]) -> list[float]:
    """An exponential mean, corrected for its start."""
    result = []
    mean = weight = 0.0
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight)
    return result
