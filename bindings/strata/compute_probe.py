"""How fast this machine computes: a feed-forward block, large products, and what next to nothing
costs. For calibrate.py, which runs the first beside other work.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

SHORTEST_SECONDS = 0.1  # spent on looking for the shortest time
TOKENS, HIDDEN, FEED_FORWARD = 64, 768, 2048  # some milliseconds, or windows would not match
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Compute:
    """Forward and backward of a feed-forward block, over and over."""

    def __init__(self, dtype: str) -> None:
        shapes = [(TOKENS, HIDDEN), (HIDDEN, FEED_FORWARD), (HIDDEN, FEED_FORWARD)]
        shapes.append((FEED_FORWARD, HIDDEN))
        source = torch.Generator().manual_seed(0)  # the user's random numbers stay as they are
        self._tensors = [
            (torch.randn(shape, generator=source) / HIDDEN).to(TORCH_DTYPES[dtype]).requires_grad_()
            for shape in shapes
        ]
        self._flops = 6 * TOKENS * 3 * HIDDEN * FEED_FORWARD
        self._once()  # what is only slow the first time

    def run(self, seconds: float) -> float:
        """FLOP/s over about `seconds`."""
        begin = time.perf_counter()
        rounds = 0
        while time.perf_counter() - begin < seconds:
            self._once()
            rounds += 1
        return rounds * self._flops / (time.perf_counter() - begin)

    def _once(self) -> None:
        x, gate, up, down = self._tensors
        with torch.enable_grad():
            torch.autograd.grad((F.silu(x @ gate) * (x @ up) @ down).sum(), self._tensors)


def matmul_flops(dtype: str) -> float:
    """FLOP/s of large matrix products."""
    a = torch.ones(512, 1024, dtype=TORCH_DTYPES[dtype])
    b = torch.ones(1024, 2048, dtype=TORCH_DTYPES[dtype])
    return 2 * a.numel() * b.shape[1] / _shortest(lambda: torch.mm(a, b))


def slice_seconds() -> float:
    """What a block costs beside its arithmetic: forward and backward of one with next to none."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        x = torch.zeros(1, 4, 32, requires_grad=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # there is nothing to share, and others may keep threads waiting
        try:
            return _shortest(lambda: block(x).sum().backward()) / 2
        finally:
            torch.set_num_threads(threads)


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of one call, undisturbed."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 8 or time.perf_counter() - begin < SHORTEST_SECONDS:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
