"""The picture of a run: loss and memory per tier over time, from the logs of its Trainer.

draw(trainer.state.log_history, {"device": 1 << 30}, Path("run/progress.png"), "llama-110m")
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from ..._report.html_figures import TIER_COLOURS
from ..._storage.replacing import writing

Record = dict[str, Any]
SMOOTHING = 0.9  # of the loss: the share that the past keeps at every step
HELD = "strata_{}_gib"  # what a tier holds in pages, in the mixin's logs
PEAK = "strata_{}_peak_gib"  # with PyTorch's own memory, of the device


def draw(history: list[Record], budgets: dict[str, int], path: Path, title: str) -> None:
    """Writes a PNG. Budgets in bytes."""
    steps = [record for record in history if "loss" in record]
    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_loss(upper, steps, [record for record in history if "eval_loss" in record])
    _draw_memory(lower, steps, budgets)
    upper.set_title(title)
    with writing(path):
        figure.savefig(path, dpi=120)


def _draw_loss(axes: Any, steps: list[Record], evaluations: list[Record]) -> None:
    minutes = [record["seconds"] / 60 for record in steps]
    losses = [record["loss"] for record in steps]
    axes.plot(minutes, losses, color="#b0b7c3", linewidth=1, label="training loss, each step")
    axes.plot(minutes, _smooth(losses), color="#30415d", linewidth=2, label="training loss, mean")
    axes.plot(
        [record["seconds"] / 60 for record in evaluations],
        [record["eval_loss"] for record in evaluations],
        "o-", color="#d1495b", linewidth=1.5, label="held-out loss",
    )  # fmt: skip
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(axes: Any, steps: list[Record], budgets: dict[str, int]) -> None:
    minutes = [record["seconds"] / 60 for record in steps]
    for tier, budget in budgets.items():
        peaks = [record.get(PEAK.format(tier), math.nan) * 1024 for record in steps]
        used = [record[HELD.format(tier)] * 1024 for record in steps]
        if not any(used):
            continue
        colour = TIER_COLOURS[tier]
        axes.plot(minutes, used, color=colour, linewidth=2, label=f"{tier}: pages")
        if not all(map(math.isnan, peaks)):
            label = f"{tier}: peak of a step, with PyTorch's"
            axes.plot(minutes, peaks, color=colour, linewidth=2, linestyle=":", label=label)
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
