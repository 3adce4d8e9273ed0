"""A step of 65,536 tokens of an 8 B Llama-3 in 24 GB of one H200, on paper: how long it takes, what
share of the device's arithmetic that is, and what it needs. Everything is computed, so the figures
are the same everywhere.

Sequences of 4,096, bfloat16, AdamW with float32 moments, `update="in_backward"`, a loss without
logits. Only arithmetic takes the device time: what element-wise kernels add is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata import _core
from strata._planning.forecast import Forecast, forecast

from .common import BenchError, Context, Figure
from .paper import H200, LLAMA_8B, llama_trace, model_flops

TOKENS = 65_536
SEQUENCE = 4_096
DEVICE_BYTES = 24 * 10**9
HOST_BYTES = 120 * 10**9
MFU_MIN = 60.0  # percent


def step(layers: int = LLAMA_8B.layers, inputs_leave: bool = True) -> Forecast:
    """The planned step. `inputs_leave`: False keeps every saved tensor on the device."""
    trace = llama_trace(
        replace(LLAMA_8B, layers=layers), TOKENS, SEQUENCE, H200.flops_s, chunked_loss=True
    )
    for unit in trace.units:
        unit.may_swap = inputs_leave
    # Gradients land in buffers of two units, which are host memory too.
    landing = sum(sorted(unit.grad_bytes for unit in trace.units)[-2:])
    budgets = H200.budgets().replace(
        device_bytes=DEVICE_BYTES,
        host_bytes=HOST_BYTES - landing,
        ssd_bytes=0,
        staging_bytes=0,
        grads_rest=False,
    )
    wishes = _core.Wishes(on_device=[False] * len(trace.units))
    return forecast(trace, H200.costs(), budgets, wishes, TOKENS)


def mfu(found: Forecast, layers: int = LLAMA_8B.layers) -> float:
    """Percent of the device's arithmetic that the step's own is, recomputation not counted."""
    flops = model_flops(replace(LLAMA_8B, layers=layers), TOKENS, SEQUENCE)
    assert found.step_seconds is not None
    return 100 * flops / (found.step_seconds * H200.flops_s)


def run(context: Context) -> Iterator[Figure]:
    """Yields the step, its share of the device's arithmetic, and its memory; says the plan."""
    layers = 4 if context.quick else LLAMA_8B.layers
    found = step(layers)
    if not found.feasible:
        raise BenchError(f"{LLAMA_8B.name} on {H200.name}: {found.refusal}")
    context.say(str(found))
    assert found.step_seconds is not None
    assert found.simulation is not None
    plan = found.plan
    reached = mfu(found, layers)
    host = HOST_BYTES - found.budgets.host_bytes + plan.peaks["host"].bytes
    yield Figure("paper-8b", "step", found.step_seconds, "s", bound=found.bound.seconds)
    yield Figure("paper-8b", "mfu", reached, "%", target=MFU_MIN, bound=100.0, better="higher")
    yield Figure("paper-8b", "host", host / 1e9, "GB", target=HOST_BYTES / 1e9)
    yield Figure("paper-8b", "device", plan.peaks["device"].bytes / 1e9, "GB", target=24.0)
    yield Figure("paper-8b", "device_min", plan.device_bytes_min / 1e9, "GB")
    for lane, use in found.simulation.lanes.items():
        share = 100 * use.busy_seconds / found.step_seconds
        yield Figure("paper-8b", f"{lane}_busy", share, "%")
    staying = step(layers, inputs_leave=False).plan.device_bytes_min
    yield Figure("paper-8b", "device_min_where_inputs_stay", staying / 1e9, "GB")
