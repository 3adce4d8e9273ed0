"""What ranks do in tests/python/test_rank_ends.py: see rank_scenarios.py."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import strata
import strata._api
from rank_loops import Rank, batches_of, hash_of, make_model, options_of, train, wrap
from rank_scenarios import bits
from strata._storage import rank_board
from strata._storage.together import Together
from torch import distributed, nn


def drops(run: Rank, then: str) -> str:
    """A model is dropped by all, and collected by rank 0 at once, by rank 1 later, as happens by
    itself. Meanwhile rank 0 goes on to what all do together."""
    gc.disable()
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    run.meet()
    del model, optimizer
    if run.rank == 0:
        gc.collect()
        if then == "raises":
            raise ArithmeticError("by the test")
    if then != "wraps":
        distributed.barrier()
        gc.collect()
    return bits(run)


def unwraps_at_the_end(run: Rank) -> str:
    """Rank 0 alone, when the others have come to the end of the script."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank:
        return hash_of(model)
    time.sleep(0.3)
    return hash_of(strata.unwrap(model))


def unwraps_late(run: Rank) -> str:
    """Rank 1 comes when rank 0 has waited for it for long enough to say so."""
    logging.basicConfig(level=logging.WARNING)
    rank_board.PATIENCE_S = 0.3
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    time.sleep(2.0 * run.rank)
    return hash_of(strata.unwrap(model))


def dies_in_unwrap(run: Rank) -> list[Any]:
    """Rank 1, when rank 0 has read everything and waits for it there. What rank 0 is told, whether
    its model is plain, and whether another call ends."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    expected = hash_of(model)
    run.meet()
    if run.rank == 1:
        while not (run.folder / "there").exists():
            time.sleep(0.005)
        time.sleep(0.5)
        os._exit(3)

    def come(*_: Any, remove: Any = strata._api.remove_tiles) -> None:
        remove(*_)
        run.mark("there")

    strata._api.remove_tiles = come
    told = ""
    try:
        strata.unwrap(model)
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}"
    plain = type(next(model.parameters())) is nn.Parameter and hash_of(model) == expected
    return [told, plain, strata.unwrap(model) is model]


def meets_by(run: Rank, backend: str) -> str:
    """The parameters after a step and a checkpoint, where torch's own group is of this backend."""
    run.join(backend, timedelta(seconds=60))
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    strata.save(model, run.folder / "checkpoint")
    strata.load(model, run.folder / "checkpoint")
    return hash_of(model)


def wraps_over(run: Rank, store: str) -> None:
    """Where ranks meet over "a file", or over a port. With the log that a user sees."""
    logging.basicConfig(level=logging.WARNING)
    if store == "a file":
        distributed.init_process_group(
            "gloo", init_method=f"file://{run.folder}/store", rank=run.rank, world_size=run.ranks
        )
    else:
        run.join("gloo")
    wrap(run, make_model())


def saves_beside_one_that_is_stopped(run: Rank, timeout: float) -> None:
    """The others call strata.save() when the test has stopped rank 1; torch waits so long."""
    run.join("gloo", timedelta(seconds=timeout))
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank == 1:
        run.mark("there")
        time.sleep(1000)
    run.await_go()
    strata.save(model, run.folder / "checkpoint")


def saves_beside_one_that_is_late(run: Rank) -> None:
    """Rank 1 calls strata.save() when the test lets it. The others say for whom they wait behind a
    second."""
    Together.of.__defaults__ = (1.0,)  # type: ignore[attr-defined]  # its patience
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank == 1:
        run.mark("there")
        run.await_go()
    strata.save(model, run.folder / "checkpoint")


def saves_without_one_that_has_ended(run: Rank) -> str:
    """Rank 1 comes to the end of its script. What the others are told."""
    Together.of.__defaults__ = (1.0,)  # type: ignore[attr-defined]  # its patience
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    if run.rank == 1:
        return ""
    try:
        strata.save(model, run.folder / "checkpoint")
    except strata.CheckpointError as error:
        return str(error)
    return "nothing"


def calls_apart(run: Rank, calls: list[str]) -> str:
    """Each rank makes a call of its own. What this one is told."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    folder = run.folder / "checkpoint"
    if "load" in calls:
        strata.save(model, folder)
    made: dict[str, Callable[[], object]] = {
        "save": lambda: strata.save(model, folder),
        "load": lambda: strata.load(model, folder),
        "snapshot": lambda: strata.snapshot(model, run.folder / "series").wait(),
        "unwrap": lambda: strata.unwrap(model),
        "step": lambda: train(run, model, optimizer, 1, first=1),
    }
    try:
        made[calls[run.rank]]()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def unwraps_behind_torch(run: Rank) -> str:
    """When the group of all processes is gone."""
    model, optimizer = wrap(run, make_model())
    train(run, model, optimizer, 1)
    run.meet()
    distributed.destroy_process_group()
    found = hash_of(strata.unwrap(model))
    assert "_strata" not in model.__dict__
    return found


def loads_over_gradients_of_one(run: Rank, update: str) -> str:
    """Rank 0 has gradients that nobody wants any more, and rank 1 has none."""
    model, optimizer = wrap(run, make_model(), **options_of(run, {"update": update}))
    train(run, model, optimizer, 1)
    strata.save(model, run.folder / "checkpoint")
    if run.rank == 0:
        model(batches_of(1)[0]).square().mean().backward()
    strata.load(model, run.folder / "checkpoint")
    train(run, model, optimizer, 1, first=1)
    return hash_of(model)
