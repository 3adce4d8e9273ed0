"""The same training under every combination of budgets, page size, I/O engine and workers: bitwise
equal losses and parameters; and in float32 equal to plain PyTorch.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .common import MIB, Context, Figure
from .models import llama, llama_config, tokens
from .sides import Paged, Plain, Side, everything_resident

HIDDEN, LAYERS, VOCABULARY = 128, 4, 512
TOKENS = 64
KIB = 1 << 10
PAGES = (64 * KIB, 256 * KIB, 1 * MIB)
ENGINES = ("io_uring", "libaio", "threads", "memory")
WORKERS = (1, 2, 3)
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: every loss and every parameter."""

    losses: list[float]
    parameters: list[torch.Tensor]

    def same_as(self, other: "Outcome") -> bool:
        """Bit for bit."""
        return self.losses == other.losses and all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(self.parameters, other.parameters, strict=True)
        )

    def distance(self, other: "Outcome") -> float:
        """The largest relative difference: of a loss, or of a parameter's norm of differences."""
        losses = zip(self.losses, other.losses, strict=True)
        parameters = zip(self.parameters, other.parameters, strict=True)
        return max(
            *(abs(a - b) / abs(b) for a, b in losses),
            *(float((a - b).norm() / b.norm()) for a, b in parameters),
        )


def train(side: Side, steps: int) -> Outcome:
    """Runs the side and closes it."""
    try:
        losses = [side.step() for _ in range(steps)]
        side.synchronize()
        state = side.model.state_dict()
        return Outcome(losses, [tensor.detach().clone() for tensor in state.values()])
    finally:
        side.close()


def budgets(place: str, page: int, parameters: int) -> dict[str, int]:
    """Everything resident; tiny budgets with some state in host memory; or all on the SSD."""
    if place == "resident":
        return everything_resident(2 * parameters)  # room for float32 too
    unit_bytes = 4 * parameters // LAYERS
    host = 48 * page + (6 * parameters if place == "tiny" else 0)
    ssd = 32 * parameters + 128 * MIB
    return {"device": unit_bytes + 8 * page, "host": host, "ssd": ssd}


def combinations(context: Context) -> Iterator[tuple[str, int, str, int]]:
    """(place, page size, I/O engine, workers)."""
    if context.quick:
        yield from [("resident", PAGES[0], "threads", 1), ("ssd", PAGES[0], "threads", 2)]
        return
    yield from itertools.product(("resident", "tiny", "ssd"), PAGES, ENGINES, WORKERS)


def paged(
    combination: tuple[str, int, str, int], dtype: torch.dtype, seed: int, folder: Path
) -> Paged:
    """The side for one combination."""
    place, page, engine, workers = combination
    model = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), dtype, seed)
    parameters = sum(p.numel() for p in model.parameters())
    options = {"page_size": page, "io_engine": engine, "workers": workers, "dtype": dtype}
    ssd_path = None if place == "resident" else folder
    batch = tokens(TOKENS, seed, VOCABULARY)
    return Paged(model, batch, budgets(place, page, parameters), ssd_path, options, **ADAMW)


def compare(sides: Iterable[tuple[str, Side]], steps: int, context: Context) -> tuple[int, int]:
    """How many sides there were, made one behind the other, and how many differ from the first."""
    count = different = 0
    first: Outcome | None = None
    for name, side in sides:
        outcome = train(side, steps)
        first = first or outcome
        count += 1
        if not outcome.same_as(first):
            different += 1
            context.say(f"{name} differs")
    return count, different


def run(context: Context) -> Iterator[Figure]:
    """Yields how many combinations differ from the first, and the distance from plain PyTorch."""
    steps = 3 if context.quick else 20
    with context.scratch() as folder:
        sides = (
            (str(each), paged(each, torch.bfloat16, context.seed, folder))
            for each in combinations(context)
        )
        count, different = compare(sides, steps, context)
        yield Figure("equal", "combinations", count, "runs")
        yield Figure("equal", "combinations_that_differ", different, "runs", target=0)

        combination = ("ssd", PAGES[0], "threads", 2)
        ours = train(paged(combination, torch.float32, context.seed, folder), steps)
    model = llama(llama_config(HIDDEN, LAYERS, VOCABULARY), torch.float32, context.seed)
    plain = train(Plain(model, tokens(TOKENS, context.seed, VOCABULARY), **ADAMW), steps)
    distance = ours.distance(plain)
    yield Figure("equal", "float32_distance_from_plain", distance, "relative", target=1e-6)
