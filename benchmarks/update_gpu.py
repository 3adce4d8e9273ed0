"""AdamW over parameters that rest on the device, bfloat16 with bfloat16 gradients: how fast the
kernel goes through the device's memory, against a copy inside it. device_update.cpp runs it,
without Python in between.
"""

import json
import subprocess
from collections.abc import Iterator

import torch

from .common import ROOT, BenchError, Context, Figure
from .device import HOST, seconds_on, torch_device

PROGRAM = ROOT / "build/release/benchmarks/device_update"
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


def update_bandwidth(context: Context, count: int) -> float:
    """GB/s of the kernel. BenchError, with the program's own words, where it cannot run."""
    if not PROGRAM.exists():
        raise BenchError(f"{PROGRAM} is not built")
    sizes = ["--params", str(count), "--turns", str(context.rounds * 3)]
    command = [str(PROGRAM), "--device", context.device, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(done.stderr.strip())
    return float(json.loads(done.stdout)["bandwidth"])


def run(context: Context) -> Iterator[Figure]:
    """Yields GB/s of the kernel, and its share of the copy's."""
    count = QUICK_PARAMETERS if context.quick else PARAMETERS
    torch_device(context.device)  # refused now, if it has to be
    copies = [copy_bandwidth(context.device, 4 * count)]
    rate = update_bandwidth(context, count)
    copies.append(copy_bandwidth(context.device, 4 * count))
    bound = max(rate, *(each / 1e9 for each in copies))
    target = None if context.device == HOST else OF_COPY_MIN
    yield Figure("update-gpu", "bandwidth", rate, "GB/s", None, bound, "higher")
    yield Figure("update-gpu", "of_copy", 100 * rate / bound, "%", target, 100, "higher")
