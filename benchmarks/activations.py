"""Peak memory of activations and step time at 8,192 tokens a step: kept, swapped, recomputed, with
the batch in 2, 4 and 8 slices, and as the planner chooses. Each mode is measured in turns with one
that keeps them, so that ratios do not depend on the hour.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from .common import Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama, llama_166m, llama_config, tokens
from .planned import Planned
from .sides import everything_resident

TOKENS, SEQUENCES = 8192, 16
MODES: dict[str, tuple[str, int | None]] = {
    "keep": ("keep", None),
    "swap": ("swap", None),
    "recompute": ("recompute", None),
    "split2": ("auto", 2),
    "split4": ("auto", 4),
    "split8": ("auto", 8),
    "auto": ("auto", None),
}
AUTO_OVER_BEST_MAX = 1.03
SPLIT4_CUT_MIN = 3.0
SPLIT4_OVER_RECOMPUTE_MAX = 1.10
GIB = 1 << 30


def run(context: Context) -> Iterator[Figure]:
    """Yields every mode's seconds and peak, then the ratios that are to be reached."""
    batch = tokens(256 if context.quick else TOKENS, context.seed, sequences=SEQUENCES)

    def side(mode: str) -> Planned:
        if context.quick:
            model = llama(llama_config(128, 2), torch.bfloat16, context.seed)
        else:
            model = llama_166m(context.seed)
        parameters = sum(p.numel() for p in model.parameters())
        memory = everything_resident(parameters)
        # Room for every mode: the modes differ in what they do, not in what they are given.
        memory["device"] += 12 * GIB
        memory["host"] += 6 * GIB
        activations, split = MODES[mode]
        return Planned(model, batch, memory, None, activations, split)

    seconds: dict[str, float] = {}
    over_keep: dict[str, float] = {}
    peaks: dict[str, int] = {}
    reference = side("keep")
    try:
        reference.settle()
        for mode in MODES:
            measured = reference if mode == "keep" else side(mode)
            try:
                if measured is not reference:
                    measured.settle()
                context.say(f"{mode}: {measured.planning.describe()}")
                turns = {
                    "keep": partial(_steady, reference),
                    mode: partial(_steady, measured),
                }
                taken = take_turns(turns, max(1, min(context.rounds, 2)), context.say)
                seconds[mode] = statistics.median(taken[mode])
                over_keep[mode] = median_ratio(taken[mode], taken["keep"])
                peaks[mode] = measured.activation_peak()
            finally:
                if measured is not reference:
                    measured.close()
                    del measured
            yield Figure("activations", f"{mode}_seconds", seconds[mode], "s")
            yield Figure("activations", f"{mode}_peak_bytes", peaks[mode], "B")
    finally:
        reference.close()
    best = min(ratio for mode, ratio in over_keep.items() if mode != "auto")
    auto = over_keep["auto"] / best
    yield Figure("activations", "auto_over_best", auto, "ratio", AUTO_OVER_BEST_MAX, 1.0)
    cut = peaks["keep"] / peaks["split4"]
    yield Figure("activations", "split4_peak_cut", cut, "ratio", SPLIT4_CUT_MIN, better="higher")
    yield Figure(
        "activations",
        "recompute_peak_over_split4",
        peaks["recompute"] / peaks["split4"],
        "ratio",
        better="higher",
    )
    yield Figure(
        "activations",
        "split4_over_recompute",
        over_keep["split4"] / over_keep["recompute"],
        "ratio",
        SPLIT4_OVER_RECOMPUTE_MAX,
    )


def _steady(side: Planned) -> float:
    """Seconds of a step whose predecessor's updates are still running when it begins."""
    return seconds_of(side.step)
