"""A step of a 70 B Llama over 64 ranks on 8 machines like those of torchtitan's tables, on paper:
how long it takes, what share of the devices' arithmetic that is, and which link binds: where each
rank sends its gradients, and where each machine sends one sum (`rank_sums="machines"`). GPUs of a
machine lend each other pages over NVLink; beside it, a step in which each copies all of them from
host memory. Everything is computed, so the figures are the same everywhere: no such machine has
run strata.

Published beside it: by torchtitan's tables FSDP2 trains Llama 3 70B on 64 A100, a sequence of 8,192
on each, at 51.7 % of their arithmetic. ZeRO++ (arXiv:2306.10209) gathers weights between machines
as int8, once a step: 4 times fewer bytes than ZeRO-3, and up to 2.16 times its speed on 384 V100
with slow links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata import _core
from strata._cli.sharing import costs_of_rank, shared_among
from strata._planning.forecast import Forecast, forecast
from strata._planning.network import Network

from .common import BenchError, Context, Figure
from .paper import H100_OF_8, LLAMA_70B, llama_trace, model_flops

SEQUENCE = 8_192
TOKENS = (SEQUENCE, 4 * SEQUENCE)  # of each rank, in a step
MACHINES, RANKS = 8, 64
LINK_BYTES_S = 8 * 45e9  # of a machine: eight of 400 Gb/s, as far as they get


def step(tokens: int, layers: int = LLAMA_70B.layers) -> Forecast:
    """The planned step of the rank that holds most, as if its machine were alone."""
    sizes, here = replace(LLAMA_70B, layers=layers), RANKS // MACHINES
    trace = llama_trace(sizes, tokens, SEQUENCE, H100_OF_8.flops_s, chunked_loss=True)
    links = ("upload_bytes_s", "download_bytes_s")  # which each device has of its own
    costs = costs_of_rank(H100_OF_8.costs(), here, "cuda", links)
    whole = H100_OF_8.budgets()
    budgets = whole.replace(host_bytes=whole.host_bytes // here)
    trace = shared_among(trace, RANKS, MACHINES)
    found = forecast(trace, costs, budgets, _core.Wishes(), RANKS * tokens)
    return replace(found, ranks=RANKS)


def run(context: Context) -> Iterator[Figure]:
    """Yields, by tokens of a rank, the step, shares of arithmetic and of the bound, and links."""
    layers = 4 if context.quick else LLAMA_70B.layers
    network = Network(MACHINES, RANKS, LINK_BYTES_S)
    with_sums = replace(network, rank_sums="machines")
    for tokens in TOKENS:
        alone = step(tokens, layers)
        found, summed = alone.over_network(network), alone.over_network(with_sums).crossing
        if not found.feasible:
            raise BenchError(f"{LLAMA_70B.name} on {H100_OF_8.name}: {found.refusal}")
        context.say(str(found))
        assert found.step_seconds is not None
        assert found.simulation is not None
        assert found.crossing is not None
        assert summed is not None
        seconds = found.step_seconds
        flops = model_flops(replace(LLAMA_70B, layers=layers), tokens, SEQUENCE)
        mfu = 100 * flops / (seconds * H100_OF_8.peak_flops_s)
        name = f"{tokens}_tokens"
        yield Figure("scale", f"step_{name}", seconds, "s")
        yield Figure("scale", f"mfu_{name}", mfu, "%", bound=100.0, better="higher")
        share = found.percent_of_bound
        yield Figure("scale", f"of_bound_{name}", share or 0.0, "%", bound=100.0, better="higher")
        for lane, use in found.simulation.lanes.items():
            yield Figure("scale", f"{lane}_busy_{name}", 100 * use.busy_seconds / seconds, "%")
        busy, least = found.crossing.seconds, found.crossing.seconds_min
        yield Figure("scale", f"network_busy_{name}", 100 * busy / seconds, "%")
        yield Figure("scale", f"network_busy_with_sums_{name}", 100 * summed.seconds / seconds, "%")
        yield Figure("scale", f"network_least_{name}", 100 * least / seconds, "%")
