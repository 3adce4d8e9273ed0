"""What ranks do in tests/python/test_machines.py whose parameters cross as codes: see
rank_scenarios.py."""

from __future__ import annotations

import hashlib
from typing import Any

import strata
import torch
from rank_loops import Rank, batches_of, hash_of, make_model, options_of, wrap
from strata._runtime.wrapped import Wrapped, wrapped

STEPS = 6
WIDTH = 256
MEMORY = {"device": "16MiB", "host": "128MiB"}  # all units: none comes twice

Runs = list[tuple[int, int, int]]  # parameter, first element, count


def trains(run: Rank, path: str | None = None, **options: Any) -> dict[str, Any]:
    """Losses of plain steps, what a forward sends, and what all read. Saves to `path`, if there is
    one."""
    options = options_of(run, options)
    model, optimizer = wrap(
        run, make_model(width=WIDTH), lr=1e-3, page_size="64KiB", memory=MEMORY, **options
    )
    state = wrapped(model)
    forward = _sent_by(state, lambda: _loss(model), run)
    losses = []
    for _ in range(STEPS):
        losses.append(_loss(model))
        _train(run, model, optimizer)
    losses.append(_loss(model))
    if path is not None:
        strata.save(model, path)
    mine = [
        (param, first, count)
        for param in range(len(state.params))
        for rank, first, count in state.session.owners(param, run.rank)
        if rank == run.rank
    ]
    return {
        "losses": losses,
        "forward": forward,
        "hash": hash_of(model),
        "mine": mine,
        "masters": _masters(state, mine),
        "report": str(strata.report(model)),
    }


def penalises(run: Rank, **options: Any) -> str:
    """The parameters behind steps whose loss uses them outside any module."""
    model, optimizer = wrap(run, make_model(width=WIDTH), lr=1e-3, memory=MEMORY, **options)
    for _ in range(2):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model)


def loads(run: Rank, path: str, runs: Runs, **options: Any) -> dict[str, Any]:
    """What a checkpoint has, read by one process."""
    model, _ = wrap(run, make_model(width=WIDTH), **options_of(run, options))
    strata.load(model, path)
    return {"hash": hash_of(model), "masters": _masters(wrapped(model), runs)}


def _train(run: Rank, model: Any, optimizer: Any) -> None:
    """A step of the micro-batches of this rank: all steps are of the same."""
    mine = run.share(batches_of(0, WIDTH))
    like = next(model.parameters())
    for batch in mine:
        (model(batch.to(like.dtype)).float().square().mean() / len(mine)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _loss(model: Any) -> float:
    like = next(model.parameters())
    with torch.no_grad():
        return model(batches_of(0, WIDTH)[0].to(like.dtype)).float().square().mean().item()


def _sent_by(state: Wrapped, what: Any, run: Rank) -> int:
    """Bytes that this rank sends while all do it."""
    assert state.wire is not None
    run.meet()
    before = sum(state.wire.sent.values())
    run.meet()
    what()
    run.meet()
    return sum(state.wire.sent.values()) - before


def _masters(state: Wrapped, runs: Runs) -> list[str]:
    """Of each run of elements, as their owner has them."""
    found = []
    for param, first, count in runs:
        values = torch.empty(count, dtype=torch.float32)
        state.session.read(param, "master", first, values.data_ptr(), count)
        found.append(hashlib.sha256(values.numpy().tobytes()).hexdigest())
    return found
