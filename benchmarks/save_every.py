"""What snapshots add to steps: one behind every tenth step, and one behind every step, over steps
without any, in turns. The state rests on the SSD, which every step rewrites.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import strata

from .common import Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama_166m_or_small, tokens
from .sides import Paged, room_of_snapshots, state_on_ssd

TOKENS = 512
STEPS = 10  # of a turn
TARGETS = {"every_10th": 1.02, "every": 1.05}


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of a step without snapshots, and how much longer steps with them take."""
    model = llama_166m_or_small(context.quick, context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    memory = state_on_ssd(parameters) | room_of_snapshots(parameters)
    with context.scratch() as folder:
        side = Paged(model, tokens(TOKENS, context.seed), memory, folder)
        try:
            for _ in range(4):
                side.step()
            strata.snapshot(side.model, folder / "first").wait()  # sets its room aside
            turns = {
                "none": partial(_seconds, side, folder, 0),
                "every_10th": partial(_seconds, side, folder, STEPS),
                "every": partial(_seconds, side, folder, 1),
            }
            taken = take_turns(turns, context.rounds, context.say)
        finally:
            side.close()
    alone = sorted(taken["none"])[len(taken["none"]) // 2]
    yield Figure("save-every", "step", alone, "s")
    for name, target in TARGETS.items():
        ratio = median_ratio(taken[name], taken["none"])
        yield Figure("save-every", f"{name}_over_none", ratio, "x", target, bound=1)


def _seconds(side: Paged, folder: Path, every: int) -> float:
    """Of a step, among STEPS with a snapshot behind each `every`th, the first among them. What the
    last left running is waited for in no one's time."""
    handles = []

    def steps() -> None:
        for step in range(STEPS):
            side.step()
            if every and step % every == 0:
                handles.append(strata.snapshot(side.model, folder / "run"))

    seconds = seconds_of(steps)
    side.synchronize()
    for handle in handles:
        handle.wait()
    return seconds / STEPS
