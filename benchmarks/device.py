"""The device that a bench measures: the host, or a GPU that PyTorch and strata share.

Names are strata's: "host" or "cuda:N". Times of a GPU end when everything on it has ended.
"""

import re
from collections.abc import Callable, Sequence

import torch

from .common import BenchError, Context, seconds_of

HOST = "host"
PRODUCT_SIZES = (4096, 8192, 16384)  # of square matrices; the fastest counts
PRODUCTS = 20
PRODUCT_ROUNDS = 3


def parse_device(text: str) -> str:
    """The name of a device that a person means. ValueError where there is no such thing."""
    if text in (HOST, "cpu"):
        return HOST
    if found := re.fullmatch(r"cuda(?::(\d+))?", text):
        return f"cuda:{int(found[1] or 0)}"
    raise ValueError(f"{text!r} is no device: host, cuda or cuda:N")


def torch_device(device: str) -> torch.device:
    """What PyTorch calls it. BenchError where it cannot be used."""
    if device == HOST:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BenchError(
            f"PyTorch {torch.__version__} sees no GPU: benchmarks/gpu/run says what is missing"
        )
    number = torch.device(device).index
    if number >= torch.cuda.device_count():
        raise BenchError(f"there is no {device}: PyTorch sees {torch.cuda.device_count()} GPUs")
    return torch.device(device)


def full_size_needs_gpu(context: Context) -> None:
    """BenchError on the host, but for --quick, which shows there that the bench runs."""
    if context.device == HOST and not context.quick:
        raise BenchError("needs a GPU: pass --device cuda; on the host it only runs --quick")
    torch_device(context.device)


def synchronize(device: str) -> None:
    """Waits until everything on the device has ended."""
    if device != HOST:
        torch.cuda.synchronize(device)


def seconds_on(device: str, work: Callable[[], object]) -> float:
    """The wall time of a call and of all that it started on the device."""
    synchronize(device)

    def whole() -> None:
        work()
        synchronize(device)

    return seconds_of(whole)


def free_bytes(device: str) -> int:
    """What a GPU has free, with PyTorch's cache given back. REQUIRES: not the host."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def product_flops_s(device: str, sizes: Sequence[int] = PRODUCT_SIZES) -> float:
    """The most arithmetic a second that bfloat16 matrix products reach, on random numbers."""
    where, best = torch_device(device), 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=where).bfloat16() for _ in range(2))
        out = torch.mm(a, b)

        def products(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            for _ in range(PRODUCTS):
                torch.mm(a, b, out=out)

        for _ in range(PRODUCT_ROUNDS):
            best = max(best, 2 * size**3 * PRODUCTS / seconds_on(device, products))
    return best
