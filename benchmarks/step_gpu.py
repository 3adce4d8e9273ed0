"""Steps of an 8 B Llama in bfloat16 within 24 GB of a GPU, of 16,384 tokens and of 65,536: the
share of the GPU's matrix products that the model's own arithmetic reaches, and that of the lower
bound.

Updates run in backward, which gives the bits of exact ones; activations and slices are planned. The
model is made where it rests, so it is never in memory as a whole. What is computed twice counts as
time and not as arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from strata._config.machine import free_host_bytes
from strata.nn import chunk_loss
from transformers import LlamaForCausalLM

from .common import GIB, MIB, BenchError, Context, Figure
from .device import (
    HOST,
    PRODUCT_SIZES,
    free_bytes,
    full_size_needs_gpu,
    product_flops_s,
    seconds_on,
    torch_device,
)
from .host_room import grow
from .models import config_of, tokens
from .paper import LLAMA_8B, LlamaSizes, model_flops
from .planned import Planned, judge, share_of_bound
from .sync_trace import synchronisations

UTILISATION_MIN = 55.0  # percent of measured matrix products
DEVICE_BYTES = 24 * 10**9
# Parameter, residual and two moments; gradients pass through. Pages cost a little more.
HOST_BYTES_EACH = 12 * 1.03
PASSING_BYTES = 4 * GIB  # gradients on their way, swapped activations
LEFT_TO_OTHERS = 4 * GIB


@dataclass(frozen=True)
class Setting:
    """What is trained, within what."""

    sizes: LlamaSizes
    sequences: tuple[int, ...]  # of a step: one batch after the other
    sequence: int
    device_bytes: int
    host_bytes: int
    products: tuple[int, ...] = PRODUCT_SIZES

    def batch(self, sequences: int, context: Context) -> torch.Tensor:
        """Of so many sequences, on the device."""
        count = sequences * self.sequence
        batch = tokens(count, context.seed, self.sizes.vocabulary, sequences)
        return batch.to(torch_device(context.device))


QUICK = Setting(
    LlamaSizes("tiny", 2, 128, 336, 2, 1, 512), (1, 2), 64, 512 * MIB, 256 * MIB, products=(256,)
)


def full_setting(say: Callable[[str], None]) -> Setting:
    """The one to reach. BenchError where host memory is too small."""
    needed = int(LLAMA_8B.parameters * HOST_BYTES_EACH) + PASSING_BYTES
    grow(needed + LEFT_TO_OTHERS, say)
    free = free_host_bytes() - LEFT_TO_OTHERS
    if free < needed:
        raise BenchError(
            f"needs {(needed + LEFT_TO_OTHERS) / 1e9:.0f} GB of host memory, "
            f"{(free + LEFT_TO_OTHERS) / 1e9:.0f} GB are free"
        )
    return Setting(LLAMA_8B, (4, 16), 4096, DEVICE_BYTES, free)


def open_side(context: Context, setting: Setting) -> Planned:
    """The model, wrapped."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(setting.sizes, setting.sequence)).train()
    chunk_loss(model)
    return Planned(
        model,
        setting.batch(setting.sequences[0], context),
        {"device": setting.device_bytes, "host": setting.host_bytes},
        options={
            "update": "in_backward",
            "dtype": torch.bfloat16,
            "weights": "init",
            "seed": context.seed,
            "init_device": torch_device(context.device),
            "device": context.device,
        },
    )


def run(context: Context) -> Iterator[Figure]:
    """Yields, for each batch, seconds of a step, what the GPU's matrix products reach, and the two
    shares."""
    full_size_needs_gpu(context)
    setting = QUICK if context.quick else full_setting(context.say)
    # Before the steps: a GPU that is hot multiplies slower.
    peak = product_flops_s(context.device, setting.products)
    before = None if context.device == HOST else free_bytes(context.device)
    side = open_side(context, setting)
    try:
        for sequences in setting.sequences:
            side.batch = setting.batch(sequences, context)
            count = sequences * setting.sequence
            calls, report = measured(context, side)
            yield from driver_calls(calls, count)
            if before is not None:
                used = before - int(torch.cuda.mem_get_info(context.device)[0])
                name, budget = f"device_memory_{count}", setting.device_bytes / 1e9
                yield Figure("step-gpu", name, used / 1e9, "GB", budget)
            target = (
                None if context.quick or sequences != max(setting.sequences) else UTILISATION_MIN
            )
            seconds, bound = report.measured_seconds, report.bound_seconds
            yield from figures(setting, count, seconds, peak, bound, target)
    finally:
        side.close()
    if context.device != HOST:
        yield from waits(traced(context))


def measured(context: Context, side: Planned) -> tuple[dict[str, int], Any]:
    """What a step under the plan for the side's batch asks of the driver, and the report."""
    side.settle()
    context.say(side.planning.describe())
    for turn in range(max(3, context.rounds)):
        context.say(f"step {turn + 1}: {seconds_on(context.device, side.step):.3g} s")
    before = side.session.stats()["driver"]
    side.step()
    calls = {name: n - before[name] for name, n in side.session.stats()["driver"].items()}
    report = judge(side, context.quick)
    share_of_bound(report)
    context.say(report.limited)
    return calls, report


def driver_calls(calls: Mapping[str, int], count: int) -> Iterator[Figure]:
    """What strata asked of the GPU's driver in a step of so many tokens, by its own count. Threads
    of the processor sleep in no call but those of workers, one for each update on the device."""
    targets = dict.fromkeys(("stream_synchronize", "map", "unmap", "set_access"), 0)
    for name, number in calls.items():
        yield Figure("step-gpu", f"driver_{name}_{count}", number, "calls", targets.get(name))


def traced(context: Context) -> dict[str, int]:
    """The waits of PyTorch's own calls: of one step of the smallest model, whose trace has some
    thousand events. One of the large model has millions, of about a kilobyte each."""
    side = open_side(context, QUICK)
    try:
        side.settle()
        return synchronisations(side.step)
    finally:
        side.close()


def waits(counts: Mapping[str, int]) -> Iterator[Figure]:
    """How often a steady step held up the processor until the GPU was done. The loop looks at the
    loss, and Transformers at whether sequences are packed: each waits for a stream once."""
    targets = {"device": 0, "stream": 2, "event": None}
    for kind, number in counts.items():
        yield Figure("step-gpu", f"{kind}_synchronisations", number, "calls", targets[kind])


def figures(
    setting: Setting, count: int, seconds: float, peak: float, bound: float, target: float | None
) -> Iterator[Figure]:
    """What a step of so many tokens, in so many seconds, says."""
    bench = "step-gpu"
    used = 100 * model_flops(setting.sizes, count, setting.sequence) / seconds / peak
    yield Figure(bench, f"seconds_{count}", seconds, "s", bound=bound)
    yield Figure(bench, f"tokens_{count}", count / seconds, "tokens/s", better="higher")
    yield Figure(bench, f"matrix_products_{count}", peak / 1e12, "TFLOP/s", better="higher")
    yield Figure(bench, f"utilisation_{count}", used, "%", target, 100, "higher")
    yield Figure(bench, f"of_bound_{count}", 100 * bound / seconds, "%", bound=100, better="higher")
