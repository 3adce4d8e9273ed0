"""One run of the quality bench: a small Llama learns Python from the standard library's sources,
which are there wherever the bench runs.

text = prepare(shape)
outcome = train(modes.lock_free(1), seed=0, shape=shape, text=text, folder=folder)
"""

import itertools
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .common import MIB
from .models import llama, llama_config, parameter_count
from .modes import Mode, Update
from .sides import Paged

TEXT_SEED = 0  # the text is the same for all runs; seeds differ in weights and in the order of text
HELD_OUT = 0.05
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
WARM_UP = 0.1  # share of the steps in which the learning rate rises; then it falls to nothing
# Small pages and a small staging area keep the disk from answering in one breath: updates then take
# about as long as computation, and LockFree has something to lag behind.
PAGE_BYTES = 64 << 10
WORKERS = 1
# Host memory for what passes through it: staging; then the gradients of two units, or of chunks.
PASSING_BYTES: dict[Update, int] = {
    "on_step": 3 * MIB,
    "in_backward": 10 * MIB,
    "lock_free": 5 * MIB,
}


@dataclass(frozen=True)
class Shape:
    """The model, the steps and the text."""

    hidden: int
    layers: int
    vocabulary: int
    sequence: int
    steps: int
    held_out_windows: int
    text_bytes: int


FULL = Shape(384, 5, 2048, 256, 400, 32, 8_000_000)
QUICK = Shape(64, 2, 512, 32, 4, 2, 200_000)


@dataclass(frozen=True)
class Text:
    """Windows of tokens to learn from, and such to be judged by."""

    training: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves. `staleness`: forwards of units, by steps that parameters lagged; empty
    where that is not counted. `digest`: of the float32 parameters."""

    mode: str
    seed: int
    losses: list[float]
    held_out: float
    staleness: list[int]
    merged: int
    seconds: float
    digest: str

    def same_as(self, other: "Outcome") -> bool:
        """Bit for bit."""
        mine = (self.losses, self.held_out, self.digest)
        return mine == (other.losses, other.held_out, other.digest)


def prepare(shape: Shape) -> Text:
    """Finds the text and turns it into windows of tokens."""
    from strata._cli.finetune.data import limited, split, train_tokenizer
    from strata._cli.finetune.encode import encoded, packed
    from strata._cli.finetune.files import find_sources, read_sources

    found = read_sources(find_sources([sysconfig.get_path("stdlib")]), HELD_OUT)
    (rows,) = limited(list(found), shape.text_bytes, TEXT_SEED)
    parts = split(rows, HELD_OUT, TEXT_SEED)
    tokenizer = train_tokenizer((row["text"] for row in parts[0]), shape.vocabulary)
    windows = []
    for part in parts:
        tokens = encoded(part, tokenizer)
        taken = packed(tokens, shape.sequence)
        windows.append(np.array(taken["input_ids"][:], dtype=np.int64))
    return Text(*windows)


def train(mode: Mode, seed: int, shape: Shape, text: Text, folder: Path) -> Outcome:
    """Trains from the beginning. The same seed sees the same weights and the same text."""
    begin = time.perf_counter()
    order = np.random.default_rng(seed).permutation(len(text.training))
    side = open_side(mode, seed, shape, folder)
    try:
        losses = learn(side, text.training[order], shape.steps)
        stats = side.session.stats()  # before evaluation, whose forwards would count too
        side.synchronize()
        held_out = evaluate(side.model, text.held_out[: shape.held_out_windows])
        return Outcome(
            mode.name,
            seed,
            losses,
            held_out,
            total(stats),
            sum(stats.get("merged gradients", [])),
            time.perf_counter() - begin,
            digest(side.model),
        )
    finally:
        side.close()


def learn(side: Paged, windows: np.ndarray[Any, Any], steps: int) -> list[float]:
    """The losses of so many steps, a window each, over and over."""
    schedule = torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda step: rate(step, steps))
    losses = []
    for step in range(steps):
        window = step % len(windows)
        side.batch = torch.from_numpy(windows[window : window + 1])
        losses.append(side.step())
        schedule.step()
    return losses


def open_side(mode: Mode, seed: int, shape: Shape, folder: Path) -> Paged:
    """The wrapped model, its optimizer state on the SSD."""
    config = llama_config(shape.hidden, shape.layers, shape.vocabulary)
    model = llama(config, torch.bfloat16, seed)
    parameters = parameter_count(shape.hidden, shape.layers, shape.vocabulary)
    options = {**mode.options(), "page_size": PAGE_BYTES, "workers": WORKERS}
    budgets = mode.state_on_ssd(parameters, PASSING_BYTES[mode.update])
    return Paged(model, torch.empty(0), budgets, folder, options, **ADAMW)


def rate(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest: up in a line, then down in one."""
    rising = max(1, round(WARM_UP * steps))
    return min((step + 1) / rising, (steps - step) / (steps - rising + 1))


@torch.no_grad()
def evaluate(model: torch.nn.Module, windows: np.ndarray[Any, Any]) -> float:
    """The mean loss of windows."""
    model.eval()
    losses = []
    for window in windows:
        batch = torch.from_numpy(window[None])
        losses.append(float(model(input_ids=batch, labels=batch).loss))
    return sum(losses) / len(losses)


def total(stats: Mapping[str, Any]) -> list[int]:
    """The histogram of staleness, of all units together."""
    return [
        sum(counts) for counts in itertools.zip_longest(*stats.get("staleness", []), fillvalue=0)
    ]


def digest(model: torch.nn.Module) -> str:
    """Of every bit of the float32 parameters."""
    from strata._core import Hasher
    from strata._runtime.wrapped import wrapped

    state = wrapped(model)
    hashed = Hasher()
    for index in range(len(state.params)):
        hashed.update(state.read(index).numpy().data)
    return hashed.hexdigest()
