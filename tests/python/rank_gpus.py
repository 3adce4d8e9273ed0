"""What ranks do in tests/python/test_ranks_gpu.py. Each takes a GPU of its own, as far as there are
as many; else they share it."""

from __future__ import annotations

import os
import signal
from typing import Any

import strata
import torch
from rank_loops import Rank, hash_of, make_model, options_of, train, wrap
from torch import nn

MEMORY = {"device": "128MiB", "host": "1GiB"}


def bits(run: Rank, steps: int = 3, path: str = "", saves: str = "", **options: Any) -> str:
    """The parameters after some steps, behind those of a checkpoint, if there is one. With frozen=
    the first layers of units rest as codes."""
    model, optimizer = _wrap(run, options)
    if path:
        strata.load(model, path)
    train(run, model, optimizer, steps)
    if saves:
        strata.save(model, saves)
    return hash_of(model)


def ends_alone(run: Rank) -> None:
    """Rank 1 ends in the middle of a run, and the other one waits for its gradients."""
    model, optimizer = _wrap(run, {})
    train(run, model, optimizer, 1)
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(run, model, optimizer, 2)


def _wrap(run: Rank, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = {"page_size": "2MiB", "memory": MEMORY} | options_of(run, options)
    options["device"] = f"cuda:{run.rank % torch.cuda.device_count()}"
    model = make_model(units=4)
    for unit in model if "frozen" in options else ():
        unit[0].weight.requires_grad_(False)
    return wrap(run, model, **options)
