"""A step of an 8 B Llama in bfloat16 within 24 GB of a GPU: the share of the GPU's matrix products
that the model's own arithmetic reaches, and the share of the lower bound.

Updates run in backward, which gives the bits of exact ones; activations and slices are planned. The
model is made where it rests, so it is never in memory as a whole. What is computed twice counts as
time and not as arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
from .models import config_of, step_flops, tokens
from .paper import LlamaSizes
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
    sequences: int
    sequence: int
    device_bytes: int
    host_bytes: int
    products: tuple[int, ...] = PRODUCT_SIZES

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequences * self.sequence


LLAMA_8B = LlamaSizes("8B", 32, 4096, 14336, 32, 8, 128_256)
QUICK = Setting(
    LlamaSizes("tiny", 2, 128, 336, 2, 1, 512), 2, 64, 512 * MIB, 256 * MIB, products=(256,)
)


def full_setting(say: Callable[[str], None]) -> Setting:
    """The one to reach: 65,536 tokens. BenchError where host memory is too small."""
    needed = int(LLAMA_8B.parameters * HOST_BYTES_EACH) + PASSING_BYTES
    grow(needed + LEFT_TO_OTHERS, say)
    free = free_host_bytes() - LEFT_TO_OTHERS
    if free < needed:
        raise BenchError(
            f"needs {(needed + LEFT_TO_OTHERS) / 1e9:.0f} GB of host memory, "
            f"{(free + LEFT_TO_OTHERS) / 1e9:.0f} GB are free"
        )
    return Setting(LLAMA_8B, 16, 4096, DEVICE_BYTES, free)


def open_side(context: Context, setting: Setting) -> Planned:
    """The model, wrapped."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(setting.sizes, setting.sequence)).train()
    chunk_loss(model)
    batch = tokens(setting.tokens, context.seed, setting.sizes.vocabulary, setting.sequences)
    return Planned(
        model,
        batch.to(torch_device(context.device)),
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
    """Yields seconds of a step, what the GPU's matrix products reach, and the two shares."""
    full_size_needs_gpu(context)
    setting = QUICK if context.quick else full_setting(context.say)
    peaks = [product_flops_s(context.device, setting.products)]
    before = None if context.device == HOST else free_bytes(context.device)
    side = open_side(context, setting)
    try:
        side.settle()
        context.say(side.planning.describe())
        for turn in range(max(3, context.rounds)):
            context.say(f"step {turn + 1}: {seconds_on(context.device, side.step):.3g} s")
        asked = side.session.stats()["driver"]
        side.step()
        yield from driver_calls(asked, side.session.stats()["driver"])
        report = judge(side, context.quick)
        share_of_bound(report)
        context.say(report.limited)
        if before is not None:
            used = before - int(torch.cuda.mem_get_info(context.device)[0])
            yield Figure("step-gpu", "device_memory", used / 1e9, "GB", setting.device_bytes / 1e9)
    finally:
        side.close()
    # A GPU that is hot multiplies slower: the faster of the two is what a step is held against.
    peaks.append(product_flops_s(context.device, setting.products))
    target = None if context.quick else UTILISATION_MIN
    yield from figures(setting, report.measured_seconds, max(peaks), report.bound_seconds, target)
    if context.device != HOST:
        yield from waits(traced(context))


def driver_calls(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[Figure]:
    """What strata asked of the GPU's driver in a step, by its own count. Threads of the processor
    sleep in no call but those of workers, one for each update on the device."""
    targets = dict.fromkeys(("stream_synchronize", "map", "unmap", "set_access"), 0)
    for name, calls in after.items():
        number = calls - before[name]
        yield Figure("step-gpu", f"driver_{name}", number, "calls", targets.get(name))


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
    loss, which waits for a stream once."""
    targets = {"device": 0, "stream": 1, "event": None}
    for kind, number in counts.items():
        yield Figure("step-gpu", f"{kind}_synchronisations", number, "calls", targets[kind])


def figures(
    setting: Setting, seconds: float, peak: float, bound: float, target: float | None
) -> Iterator[Figure]:
    """What a step of so many seconds says."""
    arithmetic = step_flops(setting.sizes, setting.tokens, setting.sequence)
    used = 100 * arithmetic / seconds / peak
    bench = "step-gpu"
    yield Figure(bench, "seconds", seconds, "s", bound=bound)
    yield Figure(bench, "tokens", setting.tokens / seconds, "tokens/s", better="higher")
    yield Figure(bench, "matrix_products", peak / 1e12, "TFLOP/s", better="higher")
    yield Figure(bench, "utilisation", used, "%", target, 100, "higher")
    yield Figure(bench, "of_bound", 100 * bound / seconds, "%", bound=100, better="higher")
