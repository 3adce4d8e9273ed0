"""The picture of the quality bench: training loss, held-out loss, and how far updates lagged.

draw(outcomes, Path("quality.png"), title="10 M parameters, 400 steps")
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, or there may be none

import matplotlib.pyplot as plt
import numpy as np

from .quality_run import Outcome

COLOURS = ("#30415d", "#d1495b", "#00798c", "#edae49", "#8d5a97", "#66a182", "#9aa1ab")
SMOOTHED_OVER = 20  # steps


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Writes a PNG. Modes come in the order in which they first appear."""
    modes = list(dict.fromkeys(outcome.mode for outcome in outcomes))
    figure, axes = plt.subplot_mosaic(
        [["loss", "held out"], ["loss", "staleness"]],
        figsize=(12, 7),
        width_ratios=[3, 2],
        layout="constrained",
    )
    try:
        _draw_losses(axes["loss"], outcomes, modes)
        _draw_held_out(axes["held out"], outcomes, modes)
        _draw_staleness(axes["staleness"], outcomes, modes)
        figure.suptitle(title)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _draw_losses(axes: Any, outcomes: Sequence[Outcome], modes: Sequence[str]) -> None:
    for mode, colour in zip(modes, COLOURS, strict=False):
        losses = np.mean([o.losses for o in outcomes if o.mode == mode], axis=0)
        width = min(SMOOTHED_OVER, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        # Exact modes lie on each other: the later one is dashed, so that both can be seen.
        style = "--" if mode == "in_backward" else "-"
        axes.plot(np.arange(width, width + len(smooth)), smooth, style, color=colour, label=mode)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, nats per token: mean of seeds and of {SMOOTHED_OVER} steps")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_held_out(axes: Any, outcomes: Sequence[Outcome], modes: Sequence[str]) -> None:
    for place, mode in enumerate(modes):
        losses = [o.held_out for o in outcomes if o.mode == mode]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot([place] * len(losses), losses, "o", color=colour, alpha=0.7)
        axes.plot([place - 0.3, place + 0.3], [np.mean(losses)] * 2, color=colour, linewidth=2)
    axes.set_xticks(range(len(modes)), modes, rotation=30, ha="right", fontsize="small")
    axes.set_ylabel("final held-out loss,\neach seed and mean")
    axes.grid(alpha=0.3, axis="y")


def _draw_staleness(axes: Any, outcomes: Sequence[Outcome], modes: Sequence[str]) -> None:
    """Shares of forwards by steps that parameters lagged: a bar for each mode that counts."""
    lagging = [m for m in modes if any(o.staleness for o in outcomes if o.mode == m)]
    longest = max((len(o.staleness) for o in outcomes), default=0)
    below = np.zeros(len(lagging))
    for age in range(longest):
        shares = np.array([share(outcomes, mode, age) for mode in lagging])
        colour = plt.get_cmap("viridis")(age / max(1, longest - 1))
        axes.barh(lagging, shares, left=below, color=colour, label=f"{age}")
        below += shares
    axes.set_xlabel("forwards, %, by steps that parameters lagged")
    axes.invert_yaxis()  # the first mode on top
    if longest:  # above the bars, which leave no room within
        axes.legend(ncols=longest, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


def share(outcomes: Sequence[Outcome], mode: str, age: int) -> float:
    """Percent of a mode's forwards that saw parameters so many steps old."""
    histograms = [o.staleness for o in outcomes if o.mode == mode]
    counted = sum(map(sum, histograms))
    return 100 * sum(h[age] for h in histograms if age < len(h)) / counted if counted else 0.0
