"""Steps of large Llamas on machines that are not here: planned, simulated, and held against the
lower bound. Everything is computed, so the figures are the same everywhere.

A step is 16,384 tokens in sequences of 2,048, in bfloat16, with AdamW and `update="on_step"`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from strata import _core
from strata._planning.forecast import Forecast, forecast

from .common import BenchError, Context, Figure
from .paper import (
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    LlamaSizes,
    PaperMachine,
    llama_trace,
)

TOKENS = 16384
SEQUENCE = 2048
SSDS = (1, 2, 4, 8)
PCIE = {"PCIe 4": 25e9, "PCIe 5": 50e9}  # bytes per second that x16 achieves, each way


@dataclass(frozen=True)
class Host:
    """A device and what it is built into."""

    device_bytes: int
    flops_s: float
    host_bytes: int
    host_memory_bytes_s: float


# The share of the printed FLOP/s that training reaches: about 60 %, 40 % and 50 %.
HOSTS = {
    "24 GB": Host(24 * 10**9, 100e12, 128 * 10**9, 80e9),
    "80 GB": Host(80 * 10**9, 400e12, 256 * 10**9, 250e9),
    "141 GB": Host(141 * 10**9, 500e12, 512 * 10**9, 250e9),
}
MODELS = (LLAMA_7B, LLAMA_13B, LLAMA_70B)


def machine(device: str, link: str, ssds: int) -> PaperMachine:
    """One of the paper machines."""
    host = HOSTS[device]
    return PaperMachine(
        f"{device}, {link}, {ssds} SSDs",
        host.device_bytes,
        host.flops_s,
        PCIE[link],
        host.host_bytes,
        host.host_memory_bytes_s,
        ssds,
    )


def replay(sizes: LlamaSizes, some: PaperMachine) -> Forecast:
    """The planned step."""
    trace = llama_trace(sizes, TOKENS, SEQUENCE, some.flops_s)
    found = forecast(
        trace,
        some.costs(),
        some.budgets(),
        _core.Wishes(on_device=[False] * len(trace.units)),
        TOKENS,
    )
    if not found.feasible:
        raise BenchError(f"{sizes.name} on {some.name}: {found.refusal}")
    return found


def run(context: Context) -> Iterator[Figure]:
    """Yields each step and its percentage of the bound, and says rows of a Markdown table."""
    models = [replace(LLAMA_7B, layers=4)] if context.quick else MODELS
    ssds = SSDS[:1] if context.quick else SSDS
    heading = " | ".join(f"{count} SSD{'s' * (count > 1)}" for count in ssds)
    context.say(f"| model | device | link | {heading} |")
    for sizes, device, link in itertools.product(models, HOSTS, PCIE):
        found: Forecast | None = None
        cells = []
        for count in ssds:
            # Where nothing needs the SSD, more of them change nothing.
            if found is None or found.plan.resting_ssd_bytes:
                found = replay(sizes, machine(device, link, count))
            name = f"{sizes.name}_{device}_{link}_{count}_ssd".lower().replace(" ", "")
            seconds, percent = found.step_seconds, found.percent_of_bound
            assert seconds is not None
            assert percent is not None
            bound = found.bound.seconds
            assert percent <= 100 * (1 + 1e-9), "a bound that a step passes is none"
            yield Figure("replay", f"step_{name}", seconds, "s", bound=bound)
            yield Figure("replay", f"of_bound_{name}", percent, "%", bound=100.0, better="higher")
            what = found.bound.what if found.plan.resting_ssd_bytes else "no SSD"
            cells.append(f"{seconds:.3g} s, {percent:.0f} % ({what})")
        context.say(f"| {sizes.name} | {device} | {link} | {' | '.join(cells)} |")
