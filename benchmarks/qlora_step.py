"""Steps of LoRA over a base in NF4: strata, the base in memory and streamed from the SSD, beside
bitsandbytes and PEFT with the base in memory. The sides take turns, each in a process of its own.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .common import GIB, MIB, BenchError, Context, Figure
from .models import parameter_count

HIDDEN, LAYERS, TOKENS = 2048, 20, 512  # 1.0 B
STEPS, WARM_STEPS = 7, 4  # strata records, times, plans and moves pages in the first ones
QUICK_LAYERS = 2
SIDES = {
    "bitsandbytes": (),
    "resident": (f"--device-bytes={4 * GIB}", f"--host-bytes={4 * GIB}"),
    "streamed": (f"--device-bytes={512 * MIB}", f"--host-bytes={192 * MIB}"),
}
TARGETS = {"resident": 1.0, "streamed": 1.15}


def measure(side: str, layers: int, context: Context) -> float:
    """Seconds of a step: the median of those behind the first ones, which plan and warm up."""
    numbers = {"hidden": HIDDEN, "layers": layers, "tokens": TOKENS, "steps": STEPS}
    program = side if side == "bitsandbytes" else "strata"
    with context.scratch() as folder:
        on_ssd = (f"--ssd-path={folder}", f"--ssd-bytes={4 * GIB}") if side == "streamed" else ()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.qlora", program, f"--seed={context.seed}"),
                *(f"--{name}={number}" for name, number in numbers.items()),
                *SIDES[side],
                *on_ssd,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise BenchError(f"{side} failed: {done.stderr.strip()[-500:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return statistics.median(seconds[WARM_STEPS:])


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
