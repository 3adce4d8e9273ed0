"""Children of the crash campaign: a run that is killed, and one that looks at what it left.

Both are forked from a process that has imported everything and wrapped nothing, so that a kill
costs no imports. A `Board` of shared memory tells the parent how far a child has come.

Threads: none of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strata
import torch
from torch import nn

from .sides import digest_of_state

SERIES, SAVED = "run", "saved"
LAST_STEP = 500  # of a run that nobody interrupts
BATCH, INPUTS, HIDDEN = 4, 96, 256  # each matrix of float32 takes more than a page
STUCK_SECONDS = 300
PR_SET_PDEATHSIG = 1
# What a run is doing: on its own thread, then on that of its snapshots.
DOING = ("nothing", "wrap", "load", "step", "snapshot", "save", "done")
WRITING = ("nothing", "commit", "removal")
PLACES: dict[str, dict[str, str]] = {
    "ssd": {"device": "512KiB", "host": "4MiB", "ssd": "64MiB"},
    "host": {"device": "8MiB", "host": "32MiB", "ssd": "64MiB"},
}


@dataclass(frozen=True)
class Setting:
    """How a run is set up. Those of equal `state_dtype` and `backwards` train the same bits."""

    place: str = "host"
    update: Any = "on_step"
    state_dtype: Any = torch.float32
    page_size: str = "64KiB"
    io_engine: str = "auto"
    drives: int = 1
    keep: int = 2
    every: int = 1  # steps to a snapshot
    backwards: int = 1  # to an update; each is called a step here
    saves: bool = False  # a checkpoint behind each snapshot


class Board:
    """A few numbers that a child and its parent share."""

    _FORM = struct.Struct("iiii")

    def __init__(self) -> None:
        """Of memory that children made by fork() keep sharing."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def _get(self, place: int) -> int:
        return int(self._FORM.unpack_from(self._memory)[place])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("i", self._memory, 4 * place, value)

    def clear(self) -> None:
        """Before a child begins; what is known to be complete stays."""
        for place in (0, 1, 3):
            self._set(place, 0)

    doing = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    writing = property(lambda self: self._get(1), lambda self, value: self._set(1, value))
    complete = property(lambda self: self._get(2), lambda self, value: self._set(2, value))
    step = property(lambda self: self._get(3), lambda self, value: self._set(3, value))


class LostError(AssertionError):
    """Something that strata promises did not hold."""


def forked(work: Callable[[], None], error: Path) -> int:
    """Runs it in a child; returns its process id. Exceptions are left in the file."""
    child = os.fork()
    if child:
        return child
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        work()
    except BaseException:
        error.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def prepare() -> None:
    """Imports all that a child needs, so that it costs nothing there."""
    torch.set_num_threads(1)
    model = nn.Linear(INPUTS, HIDDEN)
    strata.plan(model, torch.optim.AdamW(model.parameters()), memory={"host": "32MiB"})
    gc.collect()
    gc.freeze()  # it is there for good: a child's collections need not look at it


class Training:
    """Two units that learn from random numbers: the state behind a step depends on all before."""

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
        """Whether there was something complete."""
        try:
            self.steps = strata.load(self.model, series)["step"]
        except strata.CheckpointError as error:
            if "no " not in str(error) and "cannot read" not in str(error):
                raise
            return False
        return True

    def digest(self) -> bytes:
        """Of weights, moments and steps."""
        return digest_of_state(self.model)


def reference(setting: Setting, folder: Path, to: Path) -> None:
    """Leaves the digest and the loss of every step of a run that nobody interrupts."""
    training = Training(setting, folder)
    with open(to, "wb") as file:
        file.write(training.digest() + struct.pack("d", 0.0))
        for _ in range(LAST_STEP):
            loss = training.step()
            file.write(training.digest() + struct.pack("d", loss))


def read_reference(path: Path) -> list[tuple[bytes, float]]:
    """By step: the digest behind it, and its loss."""
    raw = path.read_bytes()
    return [
        (raw[i : i + 16], struct.unpack_from("d", raw, i + 16)[0]) for i in range(0, len(raw), 24)
    ]


def victim(board: Board, setting: Setting, folder: Path, operation: int) -> None:
    """Goes on from what there is, until it is killed. `operation`: it kills itself before so many
    file operations of its loads and snapshots; 0: it does not."""
    _watch_files(board, operation)
    board.doing = DOING.index("wrap")
    training = Training(setting, folder)
    board.doing = DOING.index("load")
    training.load(folder / SERIES)
    handle, taken = None, 0
    while training.steps < LAST_STEP:
        board.doing = DOING.index("step")
        training.step()
        board.step = training.steps
        if training.steps % setting.every == 0 and training.steps % setting.backwards == 0:
            board.doing = DOING.index("snapshot")
            if handle is not None and handle.complete:
                board.complete = taken
            extra = {"step": training.steps}
            handle = strata.snapshot(
                training.model, folder / SERIES, keep=setting.keep, extra=extra
            )
            taken = training.steps
            if setting.saves:
                board.doing = DOING.index("save")
                strata.save(training.model, folder / SAVED, extra=extra)
        if handle is not None and handle.complete:
            board.complete = taken
            board.writing = 0
    board.doing = DOING.index("done")
    signal.pause()


def _watch_files(board: Board, operation: int) -> None:
    """Notes what the thread of the snapshots does with files, and kills at one of all threads."""
    left = operation

    def see(event: str, arguments: Any) -> None:
        nonlocal left
        if event != "open" and not event.startswith(("os.", "shutil.")):
            return
        if board.doing < DOING.index("load"):
            return
        if threading.current_thread().name.startswith("strata-snapshot"):
            if event == "os.rename" and str(arguments[1]).endswith("removed.json"):
                board.writing = WRITING.index("removal")
            elif not board.writing:
                board.writing = WRITING.index("commit")
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def survivor(
    board: Board, setting: Setting, folder: Path, expected: list[tuple[bytes, float]]
) -> None:
    """Loads what was saved and the newest snapshot, holds both against the run that nobody
    interrupted, trains on, and takes a snapshot and saves, with which nothing of the killed run is
    left."""
    training = Training(setting, folder)
    if (folder / SAVED).exists():
        if not training.load(folder / SAVED):
            raise LostError("what was saved is not whole")
        _compare(training, expected)
    training.load(folder / SERIES)
    if training.steps < board.complete:
        raise LostError(f"step {training.steps} is the newest; step {board.complete} was complete")
    _compare(training, expected)
    for _ in range(2 * setting.backwards):
        loss = training.step()
        _compare(training, expected)
        if loss != expected[training.steps][1]:
            raise LostError(f"the loss of step {training.steps} is {loss}")
    extra = {"step": training.steps}
    strata.snapshot(training.model, folder / SERIES, keep=setting.keep, extra=extra).wait()
    board.complete = training.steps
    if setting.saves:
        strata.save(training.model, folder / SAVED, extra=extra)
    strata.unwrap(training.model)
    for path in _left_over(folder, setting.keep):
        raise LostError(f"{path} is left over")


def _compare(training: Training, expected: list[tuple[bytes, float]]) -> None:
    if training.digest() != expected[training.steps][0]:
        raise LostError(f"the state behind step {training.steps} is another")


def _left_over(folder: Path, keep: int) -> Iterator[Path]:
    """What is neither a snapshot, nor a link of one, nor what was saved."""
    known = (SERIES, SAVED, *(drive.name for drive in folder.glob("drive*")))
    yield from (entry for entry in folder.iterdir() if entry.name not in known)
    kept = sorted(entry for entry in (folder / SERIES).iterdir())
    yield from kept[:-keep]
    for entry in kept[-keep:]:
        if not (entry / "manifest.json").is_file():
            yield entry
        yield from (e for e in entry.iterdir() if e.name not in ("manifest.json", "state.bin"))
    for drive in sorted(folder.glob("drive*")):
        links = list((drive / "strata-snapshots").glob("*"))
        yield from links[2 * len(kept) :]
        yield from (e for e in drive.iterdir() if e.name != "strata-snapshots")
