"""Bandwidth of single pages between host memory and the device, each way and both, through the
port CopyEngine; against one copy of everything, each way at once (on a GPU: of pinned memory).
"""

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .common import GIB, MIB, Context, Figure
from .device import HOST, seconds_on, torch_device

if TYPE_CHECKING:
    from strata._probes import Ways

PAGE_BYTES = 4 * MIB
BYTES, QUICK_BYTES = GIB, 16 * MIB
SECONDS, QUICK_SECONDS = 0.3, 0.02  # of a turn
OF_ONE_COPY_MIN = 95.0  # percent


class OneCopy:
    """As many bytes in one copy, or in one copy for each way."""

    def __init__(self, device: str, size: int) -> None:
        self._device, self._on_gpu = device, device != HOST
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._there = torch.zeros_like(self._host, device=torch_device(device))
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._on_gpu else []

    def rate(self, ways: str) -> float:
        """Bytes a second; with "both", half of the bytes go each way, at once."""
        size = self._host.numel()
        into = {"in": size, "out": 0, "both": size // 2}[ways]
        copies = [
            (self._there[:into], self._host[:into]),
            (self._host[into:], self._there[into:]),
        ]

        def copy() -> None:
            for number, (to, source) in enumerate(copies):
                if to.numel():
                    self._copy(number, to, source)

        return size / seconds_on(self._device, copy)

    def _copy(self, number: int, to: torch.Tensor, source: torch.Tensor) -> None:
        if not self._on_gpu:
            to.copy_(source)
            return
        with torch.cuda.stream(self._streams[number]):
            to.copy_(source, non_blocking=True)


def run(context: Context) -> Iterator[Figure]:
    """Yields GB/s of each way, and percentages of what one copy reaches."""
    from strata._core import CopyProbe

    size = QUICK_BYTES if context.quick else BYTES
    seconds = QUICK_SECONDS if context.quick else SECONDS
    whole, pages = OneCopy(context.device, size), CopyProbe(PAGE_BYTES, size, context.device)
    every: tuple[Ways, ...] = ("in", "out", "both")
    for ways in every:
        whole.rate(ways)  # the first one touches everything
        pages.run(ways, QUICK_SECONDS)
        bulk, ours = [], []
        for _ in range(context.rounds * 3):
            bulk.append(whole.rate(ways) / 1e9)
            up, down = pages.run(ways, seconds)
            ours.append((up + down) / 1e9)
        rate, bound = statistics.median(ours), statistics.median(bulk)
        yield Figure("copy", f"{ways}_bandwidth", rate, "GB/s", None, bound, "higher")
        # The faster of the two is what the link allows in a turn: nothing is above 100 %.
        percent = statistics.median(100 * o / max(o, b) for o, b in zip(ours, bulk, strict=True))
        target = None if context.device == HOST else OF_ONE_COPY_MIN
        yield Figure("copy", f"{ways}_of_one_copy", percent, "%", target, 100, "higher")
