"""What scenarios of ranks share: who runs one, a model, its batches, and plain steps."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import strata
import torch
from strata._config.rank_group import WAIT
from strata._config.update_modes import parse_update
from torch import distributed, nn

WIDTH = 96
BATCHES = 4  # micro-batches of a step, over all ranks


@dataclass
class Rank:
    """Who runs a scenario."""

    rank: int
    ranks: int
    folder: Path
    port: int = 0  # of the store where ranks of a run find each other

    def join(self, backend: str, timeout: timedelta = WAIT) -> None:
        """Begins torch's group of them all."""
        assert self.port, "this rank was made without a store"
        store = distributed.TCPStore("127.0.0.1", self.port, timeout=timeout)
        distributed.init_process_group(
            backend,
            store=distributed.PrefixStore(str(self.folder), store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timeout,
        )

    def meet(self) -> None:
        """Waits for all ranks."""
        if self.ranks > 1:
            distributed.barrier()

    def mark(self, name: str) -> None:
        """Tells the test that this rank has come so far."""
        (self.folder / name).touch()

    def await_go(self) -> None:
        """Waits until the test lets ranks go on."""
        while not (self.folder / "go").exists():
            time.sleep(0.005)

    def share(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of this rank."""
        return batches[self.rank :: self.ranks]


def make_model(units: int = 3, width: int = WIDTH) -> nn.Sequential:
    """The same for all."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(units)
        ]
    )


def batches_of(step: int, width: int = WIDTH) -> list[torch.Tensor]:
    """The global micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, width, generator=generator) for _ in range(BATCHES)]


def hash_of(model: nn.Module) -> str:
    """Of all parameters, to the bit."""
    of = hashlib.sha256()
    for name, value in model.state_dict().items():
        of.update(name.encode() + value.detach().cpu().float().contiguous().numpy().tobytes())
    return of.hexdigest()


def wrap(
    run: Rank, model: nn.Module, lr: float = 1e-2, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With what a rank alone needs to give the same bits: sums in float32."""
    if options.get("update") != "in_backward":  # which sums by itself, of one backward a step
        options.setdefault("gradient_accumulation_steps", max(2, BATCHES // run.ranks))
    return strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=lr), **options)


def options_of(run: Rank, options: dict[str, Any]) -> dict[str, Any]:
    """Those of wrap(), of which JSON has names."""
    options = dict(options)
    if ":" in options.get("update", ""):
        options["update"] = parse_update(options["update"])
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    if options.get("ssd_path") == "own":
        options["ssd_path"] = run.folder / f"ssd{os.environ.get('STRATA_MACHINE', '')}"
        options["ssd_path"].mkdir(exist_ok=True)
    return options


def train(
    run: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    first: int = 0,
    width: int = WIDTH,
) -> None:
    """Plain steps of the micro-batches of this rank."""
    like = next(model.parameters())
    for step in range(first, first + steps):
        mine = run.share(batches_of(step, width))
        for batch in mine:
            (
                model(batch.to(like.device, like.dtype)).float().square().mean() / len(mine)
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
