"""Predicted against measured step time, and measured step time against the lower bound, in six
settings of budgets, tokens and activation modes; predictions also for adapters over a base in NF4,
where values are computed from codes on their way up. Steps are measured as in training, one after
the other; predictions are made before, from recorded and timed steps and what the machine can do
then. Beside them plans against the best of all plans, on small random traces: the suite
`plan_optimal` tries them all.
"""

import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .common import GIB, ROOT, BenchError, Context, Figure
from .models import llama_166m_or_small, tokens, with_adapters
from .planned import Planned, judge, share_of_bound
from .sides import everything_resident, state_on_ssd

MEDIAN_ERROR_MAX = 0.05
WORST_ERROR_MAX = 0.12
BOUND_MIN = {"compute": 0.90, "ssd": 0.85}
ROUNDS = 3  # the machine is measured again before every one
SUITE = ROOT / "build/release/tests/planner_suites"
OF_OPTIMAL = re.compile(r"planner-vs-optimal .*median=([\d.]+) worst=([\d.]+)")
RANDOM_STEPS = 400
OF_OPTIMAL_MAX = {"median": 1.03, "worst": 1.15}


@dataclass(frozen=True)
class Setting:
    """Where things may rest, how much there is to compute, and what becomes of activations."""

    tokens: int
    device_gib: float  # 0: unlimited
    on_ssd: bool
    activations: str
    frozen: str = "as-is"  # how the base of adapters rests; as it is, all is trained


SETTINGS = {
    "2048_keep": Setting(2048, 0, False, "keep"),
    "2048_tight_auto": Setting(2048, 0.5, False, "auto"),
    "2048_ssd_recompute": Setting(2048, 1.0, True, "recompute"),
    "1024_ssd_auto": Setting(1024, 0.5, True, "auto"),
    "256_ssd_swap": Setting(256, 0.5, True, "swap"),
    "128_ssd_auto": Setting(128, 0.25, True, "auto"),
}


# The link's work is mostly to compute values: the bound knows of the codes alone.
QUANTISED = {
    "64_nf4_tight": Setting(64, 0.125, False, "auto", "nf4-double"),
    "512_nf4_ssd": Setting(512, 0.25, True, "auto", "nf4-double"),
}


@dataclass(frozen=True)
class Outcome:
    """One setting, predicted and measured."""

    predicted: float
    measured: float
    share: float  # of the lower bound
    what: str  # takes longer by itself: "compute" or "ssd"


def measure(context: Context, setting: Setting, folder: Path) -> Outcome:
    """Trains some steps in a setting."""
    model = llama_166m_or_small(context.quick, context.seed)
    parameters = sum(p.numel() for p in model.parameters())
    memory = state_on_ssd(parameters) if setting.on_ssd else everything_resident(parameters)
    memory["device"] = int((setting.device_gib or 16) * GIB)
    memory["ssd" if setting.on_ssd else "host"] += 2 * GIB  # for swapped tensors
    batch = tokens(setting.tokens // (8 if context.quick else 1), context.seed)
    options = {"frozen": setting.frozen, "dtype": torch.bfloat16}
    if setting.frozen != "as-is":
        model = with_adapters(model)
    on_ssd = folder if setting.on_ssd else None
    side = Planned(model, batch, memory, on_ssd, setting.activations, options=options)
    predicted, measured, shares = [], [], []
    try:
        side.settle()
        planning = side.planning
        for _ in range(1 if context.quick else ROUNDS):
            planning.measure_again()  # the disk is shared: as it is now, and not an hour ago
            side.step()
            predicted.append(planning.simulation.step_seconds)
            judged = judge(side, context.quick)
            measured.append(judged.measured_seconds)
            shares.append(share_of_bound(judged))
        bound = planning.bound
        context.say(planning.describe())
        context.say(judged.limited)
    finally:
        side.close()
    ssd_bound = bound.ssd_seconds > bound.lane_seconds["compute"]
    what = "ssd" if ssd_bound else "compute"
    return Outcome(
        statistics.median(predicted),
        statistics.median(measured),
        statistics.median(shares),
        what,
    )


def measured(context: Context, settings: dict[str, Setting]) -> dict[str, Outcome]:
    """By name of the setting."""
    found = {}
    with context.scratch() as folder:
        for name, setting in settings.items():
            found[name] = measure(context, setting, folder)
            context.say(f"{name}: {found[name]}")
    return found


def run(context: Context) -> Iterator[Figure]:
    """Yields the error of every prediction, the median and the worst, shares of the bound, and
    plans over the best ones."""
    errors = []
    for name, outcome in measured(context, SETTINGS | QUANTISED).items():
        error = abs(outcome.predicted / outcome.measured - 1)
        errors.append(error)
        yield Figure("plan-error", f"{name}_predicted", outcome.predicted, "s")
        yield Figure("plan-error", f"{name}_measured", outcome.measured, "s")
        yield Figure("plan-error", f"{name}_error", error, "share")
        if name in SETTINGS:
            least, what = BOUND_MIN[outcome.what], f"{name}_of_{outcome.what}"
            yield Figure("plan-error", what, outcome.share, "share", least, 1.0, "higher")
    yield Figure("plan-error", "median", statistics.median(errors), "share", MEDIAN_ERROR_MAX)
    yield Figure("plan-error", "worst", max(errors), "share", WORST_ERROR_MAX)
    yield from of_optimal(context)


def of_optimal(context: Context) -> Iterator[Figure]:
    """Plans over the best of all plans, as the suite finds it."""
    if not SUITE.exists():
        raise BenchError(f"{SUITE} is not built")
    seeds = {"STRATA_SEEDS": str(60 if context.quick else RANDOM_STEPS)}
    command = [str(SUITE), "plan_optimal"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **seeds})
    found = OF_OPTIMAL.search(done.stdout)
    if found is None:
        raise BenchError(f"the suite said nothing: {done.stdout[-500:]}{done.stderr[-500:]}")
    for (name, most), value in zip(OF_OPTIMAL_MAX.items(), found.groups(), strict=True):
        yield Figure("plan-error", f"{name}_over_optimal", float(value), "ratio", most, 1.0)
