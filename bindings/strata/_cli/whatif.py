"""`strata plan`: a recorded step on another machine, on paper.

strata plan --trace step.trace.json --memory device=8GiB,host=24GiB,ssd=200GiB \
    --ssd-read-speed 12GB/s --ssd-write-speed 8GB/s --tokens-scale 4
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .._config import device
from .._storage.trace_file import load
from .planner import machine_of, reply, show
from .planner_options import budgets_of

if TYPE_CHECKING:
    from .._core import Trace


def scaled(trace: Trace, factor: float) -> Trace:
    """The step with a batch so many times as large: computation takes so many times as long, and
    what PyTorch holds grows with it. (Gradients do not grow, so somewhat too much is counted.)"""

    def grown(size: int) -> int:
        return round(size * factor)

    return {
        **trace,
        "uses": [
            {
                **use,
                "seconds": use["seconds"] * factor,
                "gap_seconds": use["gap_seconds"] * factor,
                "live_bytes": grown(use["live_bytes"]),
                "peak_bytes": grown(use["peak_bytes"]),
                "gap_peak_bytes": grown(use["gap_peak_bytes"]),
            }
            for use in trace["uses"]
        ],
        "units": [
            {**unit, "slices_max": max(1, int(unit["slices_max"] * factor))}
            for unit in trace["units"]
        ],
        "tensors": [{**tensor, "bytes": grown(tensor["bytes"])} for tensor in trace["tensors"]],
        "tail_seconds": trace["tail_seconds"] * factor,
        "tail_peak_bytes": grown(trace["tail_peak_bytes"]),
    }


def run(options: argparse.Namespace) -> int:
    """0 where the step fits, 1 where it does not. `options`: of planner_options.plan_parser()."""
    found = load(options.trace)
    trace = scaled(found.trace, options.tokens_scale)
    page_bytes = page_bytes_of(trace)
    options.device = device.choose(options.device)
    costs = machine_of(options, page_bytes).costs
    costs["compute_scale"] /= options.compute_speed
    tokens = round(found.origin.tokens * options.tokens_scale)
    answer = reply(options, trace, costs, budgets_of(options.memory, page_bytes), tokens)
    return show(answer, options.json)


def page_bytes_of(trace: Trace) -> int:
    """The page size that a trace was recorded with: a chunk is what lies behind one page. Raises
    ValueError where it cannot be told."""
    for unit in trace["units"]:
        if unit["chunks"] and unit["param_bytes"] % unit["chunks"] == 0:
            return unit["param_bytes"] // unit["chunks"]
    raise ValueError("no unit of the trace has chunks: its page size cannot be told")
