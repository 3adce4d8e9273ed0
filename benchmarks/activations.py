"""Peak memory of activations and step time at 8,192 tokens a step: kept, swapped, recomputed, with
the batch in 2, 4 and 8 slices, and as the planner chooses.
"""

import statistics
from collections.abc import Iterator
from functools import partial

from .common import Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama_166m_or_small, tokens
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
AGAINST = {"split4": "recompute", "auto": "keep"}
TURNS = 1  # steps are long
AUTO_OVER_BEST_MAX = 1.03
SPLIT4_CUT_MIN = 3.0
SPLIT4_OVER_RECOMPUTE_MAX = 1.10
GIB = 1 << 30


def run(context: Context) -> Iterator[Figure]:
    """Yields every mode's seconds and peak, then the ratios that are to be reached."""
    batch = tokens(256 if context.quick else TOKENS, context.seed, sequences=SEQUENCES)

    def side(mode: str) -> Planned:
        model = llama_166m_or_small(context.quick, context.seed)
        parameters = sum(p.numel() for p in model.parameters())
        memory = everything_resident(parameters)
        # Room for every mode: the modes differ in what they do, not in what they are given.
        memory["device"] += 12 * GIB
        memory["host"] += 6 * GIB
        activations, split = MODES[mode]
        return Planned(model, batch, memory, None, activations, split)

    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    ratios: dict[str, float] = {}
    open_sides: dict[str, Planned] = {}
    try:
        for mode in MODES:
            measured = open_sides[mode] = side(mode)
            measured.settle()
            context.say(f"{mode}: {measured.planning.describe()}")
            # What is compared takes turns, so that the ratio does not depend on the hour.
            sides = [mode] if AGAINST.get(mode) is None else [AGAINST[mode], mode]
            turns = {name: partial(seconds_of, open_sides[name].step) for name in sides}
            taken = take_turns(turns, 1 if context.quick else TURNS, context.say)
            seconds[mode] = statistics.median(taken[mode])
            peaks[mode] = measured.activation_peak()
            if mode in AGAINST:
                ratios[mode] = median_ratio(taken[mode], taken[AGAINST[mode]])
            if mode not in AGAINST.values():
                open_sides.pop(mode).close()
            yield Figure("activations", f"{mode}_seconds", seconds[mode], "s")
            yield Figure("activations", f"{mode}_peak_bytes", peaks[mode], "B")
    finally:
        for opened in open_sides.values():
            opened.close()
    best = min(value for mode, value in seconds.items() if mode not in ("auto", "keep"))
    auto = max(ratios["auto"], seconds["auto"] / best)
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
        ratios["split4"],
        "ratio",
        SPLIT4_OVER_RECOMPUTE_MAX,
    )
