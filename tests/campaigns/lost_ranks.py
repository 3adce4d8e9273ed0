"""A rank of the campaign of lost ranks: a plain script that wraps, goes on from the newest
checkpoint, trains and saves, until something ends it. A `Board` tells how far it has come.
rank_server.py starts it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strata
import torch
from campaign import Board
from random_training import HIDDEN, INPUTS, digest_of_state
from rank_loops import Rank
from torch import nn

LAST_STEP = 400  # of a run that nobody interrupts
MICRO_BATCHES = 12  # of a step, over all ranks
BATCH = 2
CHECKPOINT = "checkpoint"
DIGESTS = "digests"  # a file of the digest after every step, beginning with step 0
DIGEST_BYTES = 16
PLACES: dict[str, dict[str, str]] = {
    "ssd": {"device": "1MiB", "host": "24MiB", "ssd": "256MiB"},
    "host": {"device": "8MiB", "host": "96MiB"},
}


@dataclass(frozen=True)
class Setting:
    """How ranks are set up. All settings train the same bits."""

    folder: str  # of the run: its checkpoint, and the digests to compare with
    place: str = "host"
    page_size: str = "64KiB"
    every: int = 1  # steps to a checkpoint
    last: int = LAST_STEP
    rank_timeout: float | None = None


class Training:
    """Two units that learn from random numbers, which depend on the step alone."""

    def __init__(self, run: Rank, setting: Setting) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, INPUTS))
        memory, ssd = PLACES[setting.place], Path(setting.folder) / "ssd"
        ssd.mkdir(exist_ok=True)
        self.model, self.optimizer = strata.wrap(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            memory=memory,
            ssd_path=ssd if "ssd" in memory else None,
            page_size=setting.page_size,
            gradient_accumulation_steps=MICRO_BATCHES,
            rank_gradients="sum",
            rank_timeout=setting.rank_timeout,
            activations=None,
            device="host",
        )
        self._run = run

    def step(self, number: int) -> None:
        """Trains on this rank's micro-batches."""
        generator = torch.Generator().manual_seed(number)
        batches = torch.randn(MICRO_BATCHES, BATCH, INPUTS, generator=generator)
        for batch in self._run.share(list(batches)):
            (self.model(batch).square().mean() / MICRO_BATCHES).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def writes_digests(run: Rank, folder: str) -> None:
    """A run that nobody interrupts, by one process."""
    training = Training(run, Setting(folder))
    with (Path(folder) / DIGESTS).open("wb") as file:
        file.write(digest_of_state(training.model))
        for step in range(LAST_STEP):
            training.step(step)
            file.write(digest_of_state(training.model))


def trains(run: Rank, **setting: Any) -> None:
    """Goes on from the newest checkpoint. The board has the moment at which it raised."""
    logging.basicConfig(level=logging.WARNING)
    board = Board(run.folder / f"board-{run.rank}")
    board.doing = "meet"
    try:
        if run.ranks > 1:
            run.join("gloo")
        _train(run, Setting(**setting), board)
    except BaseException:
        board["raised"] = time.monotonic()
        raise


def _train(run: Rank, setting: Setting, board: Board) -> None:
    path = Path(setting.folder) / CHECKPOINT
    expected = (Path(setting.folder) / DIGESTS).read_bytes()
    board.doing = "wrap"
    training = Training(run, setting)
    board.doing = "load"
    done = 0
    if path.exists():
        done = strata.load(training.model, path)["step"]
    _check(training.model, done, expected)
    board["first"] = board["step"] = done
    while done < setting.last:
        board.doing = "step"
        training.step(done)
        done += 1
        board["step"] = done
        if done % setting.every == 0 or done == setting.last:
            board.doing = "save"
            strata.save(training.model, path, extra={"step": done})
            board["complete"] = done
            if run.rank == 0:
                _check(training.model, done, expected)
    board.doing = "done"


def _check(model: nn.Module, step: int, expected: bytes) -> None:
    at = step * DIGEST_BYTES
    assert digest_of_state(model) == expected[at : at + DIGEST_BYTES], f"the state after {step}"
