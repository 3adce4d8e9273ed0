"""AdamW over parameters that rest on the device, bfloat16 with bfloat16 gradients: how fast the
kernel goes through the device's memory, against a copy inside it.
"""

from collections.abc import Iterator

import torch

from . import device_program
from .common import Context, Figure
from .device import HOST, seconds_on, torch_device

PARAMETERS, QUICK_PARAMETERS = 100_000_000, 1 << 20
OF_COPY_MIN = 90.0  # percent
COPY_TURNS = 15


def copy_bandwidth(device: str, count: int) -> float:
    """Bytes a second, read and written, that PyTorch's copy of `count` float32 values reaches."""
    source = torch.zeros(count, device=torch_device(device))
    target = torch.empty_like(source)
    target.copy_(source)
    times = [seconds_on(device, lambda: target.copy_(source)) for _ in range(COPY_TURNS)]
    return 2 * source.nbytes / min(times)


def run(context: Context) -> Iterator[Figure]:
    """Yields GB/s of the kernel, and its share of the copy's."""
    count = QUICK_PARAMETERS if context.quick else PARAMETERS
    torch_device(context.device)  # refused now, if it has to be
    copies = [copy_bandwidth(context.device, 4 * count)]
    said = device_program.run(
        device_program.UPDATE, context, {"params": count, "turns": context.rounds * 3}
    )
    copies.append(copy_bandwidth(context.device, 4 * count))
    rate = said[0]["bandwidth"]
    bound = max(rate, *(each / 1e9 for each in copies))
    target = None if context.device == HOST else OF_COPY_MIN
    yield Figure("update-gpu", "bandwidth", rate, "GB/s", None, bound, "higher")
    yield Figure("update-gpu", "of_copy", 100 * rate / bound, "%", target, 100, "higher")
