"""Ranks of the bench rank-loss. A server that has imported everything forks them, so that a run
begins in a fraction of a second; each rank is a plain script that wraps, goes on from the newest
checkpoint, trains and saves, until something ends it. A `Board` tells how far it has come.

A line goes in, an order as JSON; a line comes back. "start": ranks, by their process ids. "wait":
until all have ended: their codes, and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import mmap
import os
import signal
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import strata
import torch
from torch import distributed, nn

from .peers.child import claim_stdout
from .sides import digest_of_state

LAST_STEP = 400  # of a run that nobody interrupts
MICRO_BATCHES = 12  # of a step, over all ranks
BATCH, INPUTS, HIDDEN = 2, 96, 256  # each matrix of float32 takes more than a page
CHECKPOINT = "checkpoint"
DIGESTS = "digests"  # a file of the digest behind every step, the first before all
DIGEST_BYTES = 16
PR_SET_PDEATHSIG = 1
# In the environment: the port of the store where ranks meet. It outlives them, as that of torchrun.
STORE_PORT = "STRATA_BENCH_STORE_PORT"
RANKS_MAX = 8
DOING = ("nothing", "meet", "wrap", "load", "step", "save", "done")
PLACES: dict[str, dict[str, str]] = {
    "ssd": {"device": "1MiB", "host": "24MiB", "ssd": "256MiB"},
    "host": {"device": "8MiB", "host": "96MiB"},
}


@dataclass(frozen=True)
class Setting:
    """How ranks are set up. All train the same bits."""

    folder: str
    ranks: int = 1
    place: str = "host"
    page_size: str = "64KiB"
    every: int = 1  # steps to a checkpoint
    last: int = LAST_STEP
    rank_timeout: float | None = None


class Board:
    """A few numbers of each rank that it and the bench share: a file that all of them map."""

    # DOING, steps made, step of the last save, when it raised, steps made ahead of this run
    _FORM = struct.Struct("iiidi")

    def __init__(self, folder: Path) -> None:
        path = folder / "board"
        if not path.exists():
            path.write_bytes(bytes(RANKS_MAX * self._FORM.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def get(self, rank: int) -> tuple[str, int, int, float, int]:
        """What it does, steps made, the step of its last save, when it raised, or 0, and the steps
        that others made ahead of it."""
        place = rank * self._FORM.size
        doing, step, saved, raised, first = self._FORM.unpack_from(self._memory, place)
        return DOING[doing], step, saved, raised, first

    def set(self, rank: int, **values: Any) -> None:
        """Of doing, step, saved, raised, first."""
        names = ("doing", "step", "saved", "raised", "first")
        known = dict(zip(names, self.get(rank), strict=True)) | values
        known["doing"] = DOING.index(known["doing"])
        self._FORM.pack_into(self._memory, rank * self._FORM.size, *(known[n] for n in names))


class LostError(AssertionError):
    """Something that strata promises did not hold."""


class Training:
    """Two units that learn from random numbers: the state behind a step depends on all before."""

    def __init__(self, setting: Setting, rank: int) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, INPUTS))
        folder = Path(setting.folder)
        memory = PLACES[setting.place]
        if "ssd" in memory:
            (folder / "ssd").mkdir(exist_ok=True)
        self.model, self.optimizer = strata.wrap(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            memory=memory,
            ssd_path=folder / "ssd" if "ssd" in memory else None,
            page_size=setting.page_size,
            gradient_accumulation_steps=MICRO_BATCHES,
            rank_gradients="sum",
            rank_timeout=setting.rank_timeout,
            activations=None,
            device="host",
        )
        self._rank, self._ranks = rank, setting.ranks

    def step(self, number: int) -> None:
        """Of this rank's micro-batches."""
        generator = torch.Generator().manual_seed(number)
        batches = torch.randn(MICRO_BATCHES, BATCH, INPUTS, generator=generator)
        for batch in batches[self._rank :: self._ranks]:
            (self.model(batch).square().mean() / MICRO_BATCHES).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(setting: Setting, rank: int, board: Board) -> None:
    """Goes on from what there is. Raises LostError where that is not what it should be."""
    path = Path(setting.folder) / CHECKPOINT
    expected = (Path(setting.folder) / DIGESTS).read_bytes()
    board.set(rank, doing="wrap")
    training = Training(setting, rank)
    board.set(rank, doing="load")
    done = 0
    if path.exists():
        done = strata.load(training.model, path)["step"]
    _check(training.model, done, expected)
    board.set(rank, first=done)
    while done < setting.last:
        board.set(rank, doing="step", step=done)
        training.step(done)
        done += 1
        board.set(rank, step=done)
        if done % setting.every == 0 or done == setting.last:
            board.set(rank, doing="save")
            strata.save(training.model, path, extra={"step": done})
            board.set(rank, saved=done)
            if rank == 0:
                _check(training.model, done, expected)
    board.set(rank, doing="done")


def _check(model: nn.Module, step: int, expected: bytes) -> None:
    at = step * DIGEST_BYTES
    if digest_of_state(model) != expected[at : at + DIGEST_BYTES]:
        raise LostError(f"the state behind step {step} is another than that of a whole run")


def write_digests(folder: Path) -> None:
    """Trains alone, which nobody interrupts."""
    training = Training(Setting(str(folder)), rank=0)
    with (folder / DIGESTS).open("wb") as file:
        file.write(digest_of_state(training.model))
        for step in range(LAST_STEP):
            training.step(step)
            file.write(digest_of_state(training.model))


def be_rank(setting: Setting, rank: int, run: int) -> None:
    """As a script of torchrun's is. `run`: a number that no other run of this server has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(setting.folder)
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.WARNING)
    board = Board(folder)
    board.set(rank, doing="meet")
    try:
        if setting.ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(setting.ranks)}
            store = distributed.TCPStore("127.0.0.1", int(os.environ[STORE_PORT]))
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore(str(run), store),
                rank=rank,
                world_size=setting.ranks,
            )
        train(setting, rank, board)
    except BaseException:
        board.set(rank, raised=time.monotonic())
        raise


def start(setting: Setting, run: int) -> list[int]:
    """In a rank it returns nothing, when the rank is through."""
    pids = []
    for rank in range(setting.ranks):
        pid = os.fork()
        if pid == 0:
            be_rank(setting, rank, run)
            return []
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> dict[str, Any]:
    """Returns when all have ended. Those that hang are killed, and have the code None."""
    end = time.monotonic() + seconds
    codes: dict[int, tuple[int | None, float]] = {}
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes.setdefault(pid, (os.waitstatus_to_exitcode(status), time.monotonic()))
        elif time.monotonic() > end:
            for left in set(pids) - codes.keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
                codes[left] = (None, time.monotonic())
                os.waitpid(left, 0)
        else:
            time.sleep(0.001)
    return {"codes": [codes[pid][0] for pid in pids], "ended": [codes[pid][1] for pid in pids]}


def start_order(setting: Setting) -> str:
    """The line that asks for it."""
    return json.dumps({"start": asdict(setting)})


def main() -> None:
    """Serves orders until there are no more."""
    answers = claim_stdout()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    model = nn.Linear(INPUTS, HIDDEN)  # what is imported when it is needed
    strata.plan(model, torch.optim.AdamW(model.parameters()), memory={"host": "32MiB"})
    gc.collect()
    gc.freeze()  # else each rank copies all of this when it looks at it at its end
    pids: list[int] = []
    print(json.dumps({"ready": True}), file=answers)
    for run, line in enumerate(sys.stdin):
        order = json.loads(line)
        if "digests" in order:
            child = os.fork()
            if child == 0:
                write_digests(Path(order["digests"]))
                return
            print(json.dumps({"status": os.waitpid(child, 0)[1]}), file=answers)
        elif "start" in order:
            pids = start(Setting(**order["start"]), run)
            if not pids:
                return
            print(json.dumps({"pids": pids}), file=answers)
        else:
            print(json.dumps(wait(pids, order["wait"])), file=answers)


if __name__ == "__main__":
    main()
