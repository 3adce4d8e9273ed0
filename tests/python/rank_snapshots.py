"""What ranks do in tests of their snapshots (test_rank_snapshots.py): each function runs in every
rank of a run, and in a process that is alone."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import strata
import torch
from rank_loops import Rank, hash_of, make_model, options_of, train, wrap
from rank_saves import STEPS, Kinds, loads
from strata._runtime.wrapped import wrapped
from strata._storage.snapshots import commit, ranks
from strata._storage.snapshots.capture import snapshot_alone
from strata._storage.snapshots.links import Links
from strata._storage.snapshots.series import remove_snapshot
from torch import nn

SERIES_S = 20.0  # in which a snapshot of a tiny model is complete


def start(run: Rank, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """Wrapped, behind some steps."""
    model, optimizer = wrap(run, model, **options_of(run, options))
    train(run, model, optimizer, STEPS)
    return model, optimizer


def takes(run: Rank, series: str, after: int = 1, **options: Any) -> dict[str, Any]:
    """Trains, takes a snapshot, and trains on meanwhile. What it has in the end, and draws behind
    the call."""
    model, optimizer = start(run, make_model(), **options)
    torch.manual_seed(100 + run.rank)
    extra = {"rank": run.rank, "next": (STEPS, "batches"), "own": torch.full((2,), run.rank)}
    handle = strata.snapshot(model, series, extra=extra)
    draws = torch.rand(3).tolist()
    train(run, model, optimizer, after, first=STEPS)
    folder = handle.wait(SERIES_S)
    assert handle.complete
    return {"hash": hash_of(model), "draws": draws, "folder": str(folder)}


def takes_lagging(run: Rank, series: str, **options: Any) -> dict[str, Any]:
    """Behind each of some steps whose updates lag, while the next ones train. What the model was
    behind the last of them."""
    model, optimizer = start(run, make_model(), **options)
    for step in range(STEPS, STEPS + 4):
        train(run, model, optimizer, 1, first=step)
        handle = strata.snapshot(model, series)
    at_call = hash_of(model)
    train(run, model, optimizer, 2, first=STEPS + 4)
    handle.wait(SERIES_S)
    return {"hash": at_call, "moved": hash_of(model) != at_call}


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """What strata says in the log meanwhile."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("strata")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield words
    log.removeHandler(handler)
    log.setLevel(level)


def adopted(words: list[str]) -> bool:
    """The pages were taken over where they lie."""
    return any("are read when they are needed" in line for line in words)


def goes_on(run: Rank, path: str, **options: Any) -> dict[str, Any]:
    """As rank_saves.loads(), and whether pages were adopted."""
    with noted() as words:
        found = loads(run, path, **options)
    told = [line for line in words if adopted([line]) or ": its " in line]
    return found | {"adopted": adopted(words), "told": told}


def takes_kinds(run: Rank, series: str, **options: Any) -> dict[str, Any]:
    """Of a model with frozen parameters, and statistics in buffers, which are rank 0's."""
    model, _ = start(run, Kinds(), **options)
    strata.snapshot(model, series).wait(SERIES_S)
    return {"hash": hash_of(model)}


def loads_kinds(run: Rank, series: str, **options: Any) -> dict[str, Any]:
    """The same model, loaded: of all parameters and buffers."""
    model, optimizer = wrap(run, Kinds(), **options_of(run, options))
    with noted() as words:
        strata.load(model, series)
    loaded = hash_of(model)
    run.meet()
    train(run, model, optimizer, 1, first=STEPS)
    return {"hash": loaded, "adopted": adopted(words)}


def rotates(run: Rank, series: str, steps: int, **options: Any) -> dict[str, Any]:
    """A snapshot behind every step, and then back to the first that is left."""
    model, optimizer = start(run, make_model(), snapshots=2, **options)
    hashes = []
    for step in range(STEPS, STEPS + steps):
        train(run, model, optimizer, 1, first=step)
        handle = strata.snapshot(model, series, keep=2, extra={"next": step + 1})
        hashes.append(hash_of(model))
    newest = handle.wait(SERIES_S)
    run.meet()
    there = sorted(entry.name for entry in Path(series).iterdir())
    held = wrapped(model).session.stats()["slots_kept"]
    with noted() as words:
        extra = strata.load(model, newest.parent / there[0])
    back = hash_of(model)
    run.meet()
    again = strata.snapshot(model, series, keep=2).wait(SERIES_S)
    return {
        "hashes": hashes,
        "there": there,
        "held": held,
        "extra": extra,
        "back": back,
        "adopted": adopted(words),
        "again": again.name,
    }


def replaces(run: Rank, series: str, **options: Any) -> int:
    """Each in a folder of its own, and then rank 0 removes the one before, as the Trainer does. How
    many are held in the end."""
    model, optimizer = start(run, make_model(), snapshots=1, **options)
    before: Path | None = None
    for step in range(STEPS, STEPS + 4):
        train(run, model, optimizer, 1, first=step)
        newest = snapshot_alone(model, f"{series}-{step}").wait(SERIES_S)
        run.meet()
        if run.rank == 0 and before is not None:
            remove_snapshot(before)
        run.meet()
        before = newest
    kept = wrapped(model).snapshots.kept
    kept.drop_removed()
    return len(kept)


def calls_late(run: Rank, series: str, **options: Any) -> dict[str, Any]:
    """Rank 1 calls a second after rank 0, which waits for nobody in the call, and trains on."""
    model, optimizer = start(run, make_model(), **options)
    strata.snapshot(model, series).wait(SERIES_S)
    train(run, model, optimizer, 1, first=STEPS)
    run.meet()
    if run.rank == 1:
        time.sleep(1.0)
    began = time.perf_counter()
    handle = strata.snapshot(model, series)
    seconds = time.perf_counter() - began
    train(run, model, optimizer, 1, first=STEPS + 1)
    handle.wait(SERIES_S)
    return {"seconds": seconds, "hash": hash_of(model)}


def error_of(call: Callable[[], Any]) -> list[str]:
    """How it ends."""
    try:
        call()
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def disagrees(run: Rank, series: str, what: str, **options: Any) -> dict[str, Any]:
    """One thing is different on rank 1: what is said. Then all of them take one."""
    model, optimizer = start(run, make_model(), **options)
    odd = run.rank == 1
    if what == "paths":
        said = error_of(lambda: strata.snapshot(model, f"{series}-{run.rank}").wait(SERIES_S))
    elif what == "keeps":
        said = error_of(lambda: strata.snapshot(model, series, keep=2 + odd).wait(SERIES_S))
    elif what == "arguments":
        keep: Any = "two" if odd else 2
        said = error_of(lambda: strata.snapshot(model, series, keep=keep).wait(SERIES_S))
    elif what == "absent":  # it trains on, and waits for rank 0 in step()
        said = ["none", ""]
        if not odd:
            said = error_of(strata.snapshot(model, series).wait)
    else:
        raise AssertionError(what)
    train(run, model, optimizer, 1, first=STEPS)
    folder = strata.snapshot(model, series).wait(SERIES_S)
    return {"said": said, "folder": folder.name, "hash": hash_of(model)}


def is_refused_halfway(run: Rank, series: str, who: list[int], **options: Any) -> dict[str, Any]:
    """Where these ranks have gradients that wait for a step: what is said. Then one behind it."""
    model, optimizer = start(run, make_model(), **options)
    if run.rank in who:
        model(torch.ones(1, 96)).square().mean().backward()
    said = [
        error_of(lambda: strata.snapshot(model, series).wait(SERIES_S)),
        error_of(lambda: strata.save(model, f"{series}-saved")),
    ]
    optimizer.step()
    optimizer.zero_grad()
    strata.snapshot(model, series).wait(SERIES_S)
    kept = hash_of(model)
    train(run, model, optimizer, 1, first=STEPS)
    strata.load(model, series)
    return {"said": said, "hash": kept, "loaded": hash_of(model)}


def leaves(run: Rank, series: str, **options: Any) -> list[str]:
    """Rank 1 ends its training without the call that rank 0 makes."""
    model, _ = start(run, make_model(), **options)
    if run.rank == 1:
        return ["none", ""]
    return error_of(strata.snapshot(model, series).wait)


def cannot_write(
    run: Rank, series: str, victim: int, what: str = "sync", **options: Any
) -> dict[str, Any]:
    """The victim's disk is full, once: in that method of Links. All train on, and take the next
    one."""
    model, optimizer = start(run, make_model(), **options)
    strata.snapshot(model, series).wait(SERIES_S)
    train(run, model, optimizer, 1, first=STEPS)
    middle, method = hash_of(model), getattr(Links, what)

    def full(links: Links) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if run.rank == victim:
        setattr(Links, what, full)
    said = error_of(lambda: strata.snapshot(model, series).wait(SERIES_S))
    setattr(Links, what, method)
    run.meet()
    left = sorted(entry.name for entry in Path(series).iterdir())
    run.meet()
    train(run, model, optimizer, 1, first=STEPS + 1)
    folder = strata.snapshot(model, series).wait(SERIES_S)
    return {
        "said": said,
        "left": left,
        "folder": folder.name,
        "middle": middle,
        "hash": hash_of(model),
    }


def interrupted(run: Rank, series: str, **options: Any) -> dict[str, Any]:
    """Ctrl-C while rank 0 waits for a snapshot that rank 1 is slow to take part in."""
    model, optimizer = start(run, make_model(), **options)
    run.meet()
    ended = ""
    if run.rank == 1:
        time.sleep(1.0)
    handle = strata.snapshot(model, series)
    if run.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            handle.wait()
        except KeyboardInterrupt:
            ended = "interrupted"
    folder = handle.wait(SERIES_S)
    train(run, model, optimizer, 1, first=STEPS)
    return {"ended": ended, "folder": folder.name, "hash": hash_of(model)}


def hashes_by_step(run: Rank, steps: int, **options: Any) -> list[str]:
    """Of a run that nothing interrupts; the first is behind STEPS steps."""
    model, optimizer = start(run, make_model(), **options)
    found = [hash_of(model)]
    for step in range(STEPS, STEPS + steps):
        train(run, model, optimizer, 1, first=step)
        found.append(hash_of(model))
    return found


def under_fire(
    run: Rank, series: str, steps: int, victim: int, where: str = "", keep: int = 2, **options: Any
) -> None:
    """A snapshot behind every step. The victim stays `where`, once the second one comes there,
    until it is killed; with none it says when the first is complete, and trains on."""
    model, optimizer = start(run, make_model(), **options)
    strata.snapshot(model, series, keep=keep).wait(SERIES_S)
    run.meet()
    if run.rank == victim:
        stay_at(run, where)
        if not where:
            run.mark("there")
    for step in range(STEPS, STEPS + steps):
        train(run, model, optimizer, 1, first=step)
        strata.snapshot(model, series, keep=keep)
    strata.snapshot(model, series, keep=keep).wait(SERIES_S)


PLACES: dict[str, tuple[Any, str]] = {
    "clean": (commit.Durability, "sync_pages"),
    "links": (Links, "__init__"),
    "linked": (Links, "sync"),
    "part": (ranks, "write_part"),
    "manifest": (commit, "write_manifest"),
    "newest": (commit, "make_newest_of"),
    "finish": (Links, "finish"),
    "rotate": (commit.KeptSnapshots, "rotate"),
}


def stay_at(run: Rank, where: str) -> None:
    """The next time that this process comes there, it says so, and goes no further."""
    if not where:
        return
    of, name = PLACES[where]
    assert hasattr(of, name), f"{of} has no {name}: nobody would come there"

    def stay(*_: Any) -> None:
        run.mark("there")
        time.sleep(1000)

    setattr(of, name, stay)


def trains_on(run: Rank, series: str, keep: int = 2, **options: Any) -> dict[str, Any]:
    """What the newest snapshot of the series has, and of which step it is; and another one."""
    model, optimizer = wrap(run, make_model(), **options_of(run, options))
    strata.load(model, series)
    loaded = hash_of(model)
    step = int(wrapped(model).steps_before)
    train(run, model, optimizer, 1, first=step)
    folder = strata.snapshot(model, series, keep=keep).wait(SERIES_S)
    return {"step": step, "loaded": loaded, "trained": hash_of(model), "folder": folder.name}


def without_links(run: Rank, series: str, **options: Any) -> list[str]:
    """The drives' file systems have no hard links."""
    model, _ = start(run, make_model(), **options)
    session: Any = type(wrapped(model).session)
    session.link_pages = lambda *_: False
    return error_of(lambda: strata.snapshot(model, series).wait(SERIES_S))
