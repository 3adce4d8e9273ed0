"""A small training whose state after a step depends on all steps before it, for tests and campaigns
that interrupt it: processes that are killed or stopped, disks that fill, exceptions of signals."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strata
import torch
from strata._runtime.wrapped import wrapped
from torch import nn

SERIES = "run"  # the folder of its snapshots
BATCH, INPUTS, HIDDEN = 4, 96, 256  # each matrix of float32 takes more than a page
PLACES: dict[str, dict[str, str]] = {
    "ssd": {"device": "512KiB", "host": "4MiB", "ssd": "64MiB"},
    "host": {"device": "8MiB", "host": "32MiB", "ssd": "64MiB"},
}


def digest_of_state(model: nn.Module) -> bytes:
    """16 bytes: a hash over the weights, moments and steps of a wrapped model."""
    state = wrapped(model)
    digest = hashlib.blake2b(digest_size=16)
    for i in range(len(state.params)):
        digest.update(struct.pack("q", state.session.param_step(i)))
        for kind in ("master", "moment1", "moment2"):
            digest.update(state.read(i, kind).numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True)
class Setting:
    """How a run is set up. Runs of equal `state_dtype` and `backwards` train the same bits."""

    place: str = "host"
    update: Any = "on_step"
    state_dtype: Any = torch.float32
    page_size: str = "64KiB"
    io_engine: str = "auto"
    drives: int = 1
    keep: int = 2
    every: int = 1  # steps to a snapshot
    backwards: int = 1  # to an update; each is called a step here
    saves: bool = False  # a checkpoint after each snapshot


class Training:
    """Two units with dropout that learn from random numbers."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        """Wraps the model."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, INPUTS))
        paths = [folder / f"drive{i}" for i in range(setting.drives)]
        self.model, self.optimizer = strata.wrap(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            memory=PLACES[setting.place],
            ssd_path=paths,
            update=setting.update,
            gradient_accumulation_steps=setting.backwards,
            state_dtype=setting.state_dtype,
            page_size=setting.page_size,
            io_engine=setting.io_engine,
            activations=None,
            device="host",
        )
        torch.manual_seed(2)
        self.steps = 0
        self._backwards = setting.backwards

    def step(self) -> float:
        """Returns its loss."""
        loss = self.model(torch.randn(BATCH, INPUTS)).square().mean()
        loss.backward()
        self.steps += 1
        if self.steps % self._backwards == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def load(self, series: Path) -> bool:
        """Returns whether there was something complete."""
        try:
            self.steps = strata.load(self.model, series)["step"]
        except strata.CheckpointError as error:
            if "no " not in str(error) and "cannot read" not in str(error):
                raise
            return False
        return True

    def digest(self) -> bytes:
        """A hash over weights, moments and steps."""
        return digest_of_state(self.model)
