"""One run of the quality bench: a small Llama learns Python from the standard library's sources,
which are there wherever the bench runs.

text = prepare(shape, folder)
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
    """Tokens to learn from, and tokens to be judged by."""

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


def prepare(shape: Shape, folder: Path) -> Text:
    """Finds the text and turns it into tokens, as files in `folder`."""
    from strata._cli.finetune.text import find_documents, split, tokenize, train_tokenizer

    documents = find_documents([sysconfig.get_path("stdlib")], shape.text_bytes, TEXT_SEED)
    training, held_out = split(documents, HELD_OUT, TEXT_SEED)
    tokenizer = train_tokenizer((d.text for d in training), shape.vocabulary)
    return Text(
        tokenize(tokenizer, training, folder / "training.bin"),
        tokenize(tokenizer, held_out, folder / "held_out.bin"),
    )


def train(mode: Mode, seed: int, shape: Shape, text: Text, folder: Path) -> Outcome:
    """Trains from the beginning. The same seed sees the same weights and the same text."""
    from strata._cli.finetune.text import Windows

    begin = time.perf_counter()
    windows = Windows(text.training, shape.sequence, seed)
    side = open_side(mode, seed, shape, folder)
    try:
        schedule = torch.optim.lr_scheduler.LambdaLR(
            side.optimizer, lambda step: rate(step, shape.steps)
        )
        losses = []
        for step in range(shape.steps):
            side.batch = windows.batch(step, 1)
            losses.append(side.step())
            schedule.step()
        stats = side.session.stats()  # before evaluation, whose forwards would count too
        side.synchronize()
        held_out = evaluate(side.model, Windows(text.held_out, shape.sequence, TEXT_SEED), shape)
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
def evaluate(model: torch.nn.Module, windows: Any, shape: Shape) -> float:
    """The mean loss of the first held-out windows."""
    model.eval()
    losses = []
    for window in range(min(shape.held_out_windows, windows.count)):
        batch = windows.batch(window, 1)
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
