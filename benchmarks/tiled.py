"""Time and peak memory of head and loss, forward and backward: logits as one matrix, against logits
that are made in chunks, by a head in one piece and by one in tiles.

A bfloat16 head of 4096 x 32,000 and 2,048 tokens, on PyTorch alone. The weight's gradient goes as
soon as it is complete, as in a wrapped model. Chunks cost a fourth matrix product beside three: the
bound of the ratios.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from strata._profiling.memory_curve import MemoryCurve
from strata.nn import ChunkedCrossEntropy, TiledLinear
from torch import nn
from torch.nn import functional as F

from .common import BenchError, Context, Figure, median_ratio, seconds_of, take_turns

FEATURES, COLUMNS, TOKENS = 4096, 32_000, 2048
QUICK = (64, 4000, 256)
TILES = 8
PRODUCTS = 4 / 3  # logits, and the gradients of weight and input; chunks make the logits twice
OVER_PLAIN_MAX = 1.4
Side = Callable[[], torch.Tensor]


def _seconds(side: Side) -> float:
    return seconds_of(lambda: side().backward())


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _sides(features: int, columns: int, tokens: int, seed: int) -> dict[str, Side]:
    """The loss of each side, with hidden states and targets that all share."""
    torch.manual_seed(seed)
    head = nn.Linear(features, columns, bias=False, dtype=torch.bfloat16)
    tiled = TiledLinear.from_linear(head, TILES)
    for parameter in (*head.parameters(), *tiled.parameters()):
        parameter.register_post_accumulate_grad_hook(_drop)
    hidden = torch.randn(tokens, features).bfloat16().requires_grad_()
    hidden.register_post_accumulate_grad_hook(_drop)
    targets = torch.randint(0, columns, (tokens,))
    criterion = ChunkedCrossEntropy()
    return {
        "plain": lambda: F.cross_entropy(head(hidden).float(), targets),
        "chunked": lambda: criterion(hidden, head, targets),
        "tiled": lambda: criterion(hidden, tiled, targets),
    }


def _peak(side: Side) -> int:
    """The most bytes that PyTorch holds during one forward and backward."""
    curve = MemoryCurve.start()
    if curve is None:
        raise BenchError("another profiler is running: peaks cannot be measured")
    side().backward()
    curve.stop()
    return curve.peak(0.0, float("inf"))


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds and peak bytes of each side, then what is to be reached."""
    features, columns, tokens = QUICK if context.quick else (FEATURES, COLUMNS, TOKENS)
    sides = _sides(features, columns, tokens, context.seed)
    logits = 4 * tokens * columns
    for side in sides.values():
        side().backward()  # the first run packs weights and touches every page
    turns = {name: partial(_seconds, side) for name, side in sides.items()}
    taken = take_turns(turns, context.rounds, context.say)
    peaks = {name: _peak(side) for name, side in sides.items()}
    for name, seconds in taken.items():
        yield Figure("tiled", f"{name}_seconds", statistics.median(seconds), "s")
        yield Figure("tiled", f"{name}_peak_bytes", peaks[name], "B", None, logits)
    for name in ("chunked", "tiled"):
        over = median_ratio(taken[name], taken["plain"])
        yield Figure("tiled", f"{name}_time_over_plain", over, "ratio", OVER_PLAIN_MAX, PRODUCTS)
        yield Figure("tiled", f"{name}_peak_over_plain", peaks[name] / peaks["plain"], "ratio")
    yield Figure("tiled", "tiled_peak_over_logits", peaks["tiled"] / logits, "ratio", 1.0)
