"""Steps of LoRA over a base in NF4: strata, the base in memory and streamed from the SSD, beside
bitsandbytes and PEFT with the base in memory. The sides take turns, each in a process of its own.
"""

import statistics
import subprocess
from collections.abc import Iterator

from .attempt import command, report
from .common import GIB, MIB, BenchError, Context, Figure
from .models import parameter_count

HIDDEN, LAYERS, TOKENS = 2048, 20, 512  # 1.0 B
STEPS, WARM_STEPS = 7, 4  # strata records, times, plans and moves pages in the first ones
QUICK_LAYERS = 2
SIDES: dict[str, dict[str, int]] = {
    "bitsandbytes": {},
    "resident": {"device_bytes": 4 * GIB, "host_bytes": 4 * GIB},
    "streamed": {"device_bytes": 512 * MIB, "host_bytes": 192 * MIB, "ssd_bytes": 4 * GIB},
}
TARGETS = {"resident": 1.0, "streamed": 1.15}


def measure(side: str, layers: int, context: Context) -> float:
    """Seconds of a step: the median of those after the first ones, which plan and warm up."""
    numbers = {"hidden": HIDDEN, "layers": layers, "tokens": TOKENS, "steps": STEPS}
    numbers |= {"seed": context.seed, **SIDES[side]}
    program = side if side == "bitsandbytes" else "strata"
    with context.scratch() as folder:
        more: dict[str, object] = {"ssd_path": folder} if side == "streamed" else {}
        words = command(program, adapters=True, planned=True, **numbers, **more)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{side} failed: {done.stderr.strip()[-500:]}")
    return statistics.median(report(done)["seconds"][WARM_STEPS:])


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of each side, and ours over bitsandbytes'."""
    layers = QUICK_LAYERS if context.quick else LAYERS
    context.say(f"{parameter_count(HIDDEN, layers) / 1e9:.2f} B parameters, {TOKENS} tokens")
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(1 if context.quick else context.rounds):
        for side in SIDES:
            try:
                found[side].append(measure(side, layers, context))
            except BenchError as error:
                if side != "bitsandbytes" or "No module named" not in str(error):
                    raise
                context.say("bitsandbytes is not installed: its side is left out")
                continue
            context.say(f"{side}: {found[side][-1]:.2f} s a step")
    for side, times in found.items():
        if times:
            yield Figure("qlora-step", f"{side}_seconds", statistics.median(times), "s")
    peer = found["bitsandbytes"]
    for side, target in TARGETS.items():
        if peer:
            ratio = statistics.median(a / b for a, b in zip(found[side], peer, strict=True))
            yield Figure("qlora-step", f"{side}_over_bitsandbytes", ratio, "x", target)
