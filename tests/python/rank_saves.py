"""What ranks do in tests/python/test_rank_saves.py: each function runs in every rank of a run, and
in a process that is alone."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import strata
import torch
from rank_loops import Rank, hash_of, make_model, options_of, train, wrap
from strata._runtime.wrapped import wrapped
from strata._storage import checkpoint_writer, shards
from strata._storage.checkpoint_files import read_manifest
from strata._storage.together import owned
from torch import nn

STEPS = 2  # of a run that is then saved


class Kinds(nn.Module):
    """Trained and frozen parameters, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(96, 200).requires_grad_(False)
        self.norm = nn.BatchNorm1d(200)
        self.trained = nn.Linear(200, 96)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.trained(self.norm(self.frozen(batch)))


def _trained(run: Rank, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    model, optimizer = wrap(run, model, **options_of(run, options))
    train(run, model, optimizer, STEPS)
    return model, optimizer


def saves(run: Rank, path: str, after: int = 1, **options: Any) -> dict[str, Any]:
    """Trains, saves and trains on. What it has in the end, and draws behind save()."""
    model, optimizer = _trained(run, make_model(), **options)
    torch.manual_seed(100 + run.rank)
    extra = {"rank": run.rank, "next": (STEPS, "batches")}
    strata.save(model, path, extra=extra)
    draws = torch.rand(3).tolist()
    train(run, model, optimizer, after, first=STEPS)
    return {"hash": hash_of(model), "draws": draws}


class SlowNAdam(torch.optim.NAdam):
    """Whose updates take so long that later ones are taken along."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def saves_lagging(run: Rank, path: str) -> dict[str, list[int]]:
    """What a checkpoint says of how many steps parameters have made, and what those ranks know that
    own them. Others own nothing of some."""
    model = make_model()
    optimizer: Any = SlowNAdam(model.parameters(), lr=1e-2)
    how: dict[str, Any] = {"update": strata.LockFree(max_staleness=3), "workers": 1}
    how["gradient_accumulation_steps"] = 2
    model, optimizer = strata.wrap(model, optimizer, **how)
    train(run, model, optimizer, 6)
    strata.save(model, path)
    state = wrapped(model)
    known = [
        state.session.param_step(i) if owned(state, i, run.rank) else 0
        for i in range(len(state.params))
    ]
    return {"saved": [e["step"] for e in read_manifest(Path(path))["params"]], "known": known}


def cannot_begin(run: Rank, path: str, **options: Any) -> dict[str, Any]:
    """Rank 0 cannot say how far it has come. What each is told; then a save goes well."""
    model, optimizer = _trained(run, make_model(), **options)

    def fails(*_: Any) -> None:
        raise OSError("not here")

    progress = fails if run.rank == 0 else None
    said = _error_of(lambda: strata.save(model, path, progress=progress))
    run.meet()
    train(run, model, optimizer, 1, first=STEPS)
    strata.save(model, path)
    return {"said": said}


def loads(
    run: Rank, path: str, after: int = 1, again: bool = False, **options: Any
) -> dict[str, Any]:
    """Goes on from what saves() has saved, with a model that has other values. `again`: and saves
    there."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model, optimizer = wrap(run, model, lr=0.5, **options_of(run, options))
    train(run, model, optimizer, 1, first=7)
    extra = strata.load(model, path)
    draws = torch.rand(3).tolist()
    loaded = hash_of(model)
    train(run, model, optimizer, after, first=STEPS)
    trained = hash_of(model)
    if again:
        strata.save(model, path)
    return {"hash": trained, "loaded": loaded, "draws": draws, "extra": repr(extra)}


def saves_twice(run: Rank, path: str) -> dict[str, Any]:
    """With a step between: what is frozen is linked. Inodes of the first, and of the second."""
    model, optimizer = _trained(run, Kinds())
    inodes = []
    for step in range(2):
        train(run, model, optimizer, 1, first=STEPS + step)
        strata.save(model, path)
        run.meet()
        inodes.append({file.name: file.stat().st_ino for file in Path(path).iterdir()})
        run.meet()
    return {"hash": hash_of(model), "inodes": inodes}


def loads_kinds(run: Rank, path: str) -> dict[str, Any]:
    """The same model, loaded: of all parameters and buffers."""
    model, _ = wrap(run, Kinds())
    strata.load(model, path)
    return {"hash": hash_of(model)}


def saves_under_fire(run: Rank, path: str, where: str, victim: int) -> None:
    """A checkpoint is there, and another one takes its place; the victim comes to a moment of that,
    says so, and stays until it is killed."""
    model, optimizer = _trained(run, make_model())
    strata.save(model, path)
    train(run, model, optimizer, 1, first=STEPS)
    if run.rank == victim:
        _stay_at(run, where, Path(path))
    strata.save(model, path)


def _stay_at(run: Rank, where: str, path: Path) -> None:
    def stay() -> None:
        run.mark("there")
        time.sleep(1000)

    if where == "shard":
        _before_write(2, stay)
    if where == "manifest":
        checkpoint_writer.write_manifest = lambda *_: stay()
    rename = os.rename

    def renamed(old: Any, new: Any) -> None:
        if (where == "aside" and Path(old) == path) or (where == "between" and Path(new) == path):
            stay()
        rename(old, new)

    os.rename = renamed


def _before_write(number: int, do: Callable[[], None]) -> None:
    """Ahead of that write of a tensor in this process."""
    write, count = shards.ShardWriter.write, 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            do()
        return write(*arguments)

    shards.ShardWriter.write = counted  # type: ignore[method-assign]


def cannot_write(run: Rank, path: str, victim: int) -> dict[str, Any]:
    """The victim's disk is full at its second tensor, once. All train on, and save again."""
    model, optimizer = _trained(run, make_model())
    strata.save(model, path)
    train(run, model, optimizer, 1, first=STEPS)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if run.rank == victim:
        _before_write(2, full)
    said = _error_of(lambda: strata.save(model, path))
    left = sorted(file.name for file in Path(path).parent.iterdir())
    run.meet()
    old = step_of(path)
    run.meet()
    strata.save(model, path)
    return {"said": said, "left": left, "old": old, "hash": hash_of(model)}


def step_of(path: str) -> int:
    """Of a checkpoint."""
    return int(read_manifest(Path(path))["step"])


def _error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except (RuntimeError, OSError, TypeError) as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def loads_damaged(run: Rank, path: str, sound: str) -> dict[str, Any]:
    """Nothing is changed by it; the next load finds all as it should be."""
    model, optimizer = _trained(run, make_model())
    before = hash_of(model)
    said = _error_of(lambda: strata.load(model, path))
    unchanged = hash_of(model) == before
    strata.load(model, sound)
    train(run, model, optimizer, 1, first=STEPS)
    return {"said": said, "unchanged": unchanged, "hash": hash_of(model)}


def disagrees(run: Rank, path: str, what: str) -> list[str]:
    """One thing is different on rank 1. What is said."""
    model, _ = _trained(run, make_model())
    odd = run.rank == 1
    if what == "paths":
        return _error_of(lambda: strata.save(model, f"{path}-{run.rank}"))
    if what == "calls":
        strata.save(model, path)
        return _error_of(lambda: (strata.load if odd else strata.save)(model, path))
    if what == "extra":
        extra = {"key": torch.ones(1)} if odd else {"key": 1}
        return _error_of(lambda: strata.save(model, path, extra=extra))
    raise AssertionError(what)


def loads_behind_a_backward(run: Rank, path: str) -> list[str]:
    """Goes on twice from one checkpoint, once with gradients that have landed. How it ends."""
    model, optimizer = _trained(run, make_model())
    strata.save(model, path)
    train(run, model, optimizer, 1, first=STEPS)
    found = [hash_of(model)]
    model(torch.ones(1, 96)).square().mean().backward()
    strata.load(model, path)
    train(run, model, optimizer, 1, first=STEPS)
    return [*found, hash_of(model)]
