"""Children of the campaign of kills: a run that is killed, and one that looks at what it left.

Both are forked from a process that has imported everything and wrapped nothing, so that a kill
costs no imports. A `Board` tells the parent how far a child has come.

Threads: none of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import strata
from campaign import Board
from random_training import SERIES, Setting, Training

SAVED = "saved"
LAST_STEP = 500  # of a run that nobody interrupts
STUCK_SECONDS = 300
PR_SET_PDEATHSIG = 1
WRITING = ("nothing", "commit", "removal")  # what the thread of its snapshots does


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


def reference(setting: Setting, folder: Path, to: Path) -> None:
    """Leaves the digest and the loss of every step of a run that nobody interrupts."""
    training = Training(setting, folder)
    with open(to, "wb") as file:
        file.write(training.digest() + struct.pack("d", 0.0))
        for _ in range(LAST_STEP):
            loss = training.step()
            file.write(training.digest() + struct.pack("d", loss))


def read_reference(path: Path) -> list[tuple[bytes, float]]:
    """By step: the digest after it, and its loss."""
    raw = path.read_bytes()
    return [
        (raw[i : i + 16], struct.unpack_from("d", raw, i + 16)[0]) for i in range(0, len(raw), 24)
    ]


def victim(board: Board, setting: Setting, folder: Path, operation: int) -> None:
    """Goes on from what there is, until it is killed. `operation`: it kills itself before so many
    file operations of its loads and snapshots; 0: it does not."""
    _watch_files(board, operation)
    board.doing = "wrap"
    training = Training(setting, folder)
    board.doing = "load"
    training.load(folder / SERIES)
    handle, taken = None, 0
    while training.steps < LAST_STEP:
        board.doing = "step"
        training.step()
        board["step"] = training.steps
        if training.steps % setting.every == 0 and training.steps % setting.backwards == 0:
            board.doing = "snapshot"
            if handle is not None and handle.complete:
                board["complete"] = taken
            extra = {"step": training.steps}
            handle = strata.snapshot(
                training.model, folder / SERIES, keep=setting.keep, extra=extra
            )
            taken = training.steps
            if setting.saves:
                board.doing = "save"
                strata.save(training.model, folder / SAVED, extra=extra)
        if handle is not None and handle.complete:
            board["complete"] = taken
            board["writing"] = 0
    board.doing = "done"
    signal.pause()


def _watch_files(board: Board, operation: int) -> None:
    """Notes what the thread of the snapshots does with files, and kills at one of all threads."""
    left = operation

    def see(event: str, arguments: Any) -> None:
        nonlocal left
        if event != "open" and not event.startswith(("os.", "shutil.")):
            return
        if board.doing in ("nothing", "wrap"):
            return
        if threading.current_thread().name.startswith("strata-snapshot"):
            if event == "os.rename" and str(arguments[1]).endswith("removed.json"):
                board["writing"] = WRITING.index("removal")
            elif not board["writing"]:
                board["writing"] = WRITING.index("commit")
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def survivor(
    board: Board, setting: Setting, folder: Path, expected: list[tuple[bytes, float]]
) -> None:
    """Loads the checkpoint and the newest snapshot, compares both with the run that nobody
    interrupted, trains on, and takes a snapshot and saves; then nothing of the killed run is left.
    """
    training = Training(setting, folder)
    if (folder / SAVED).exists():
        assert training.load(folder / SAVED), "the checkpoint is not whole"
        _compare(training, expected)
    training.load(folder / SERIES)
    complete = int(board["complete"])
    said = f"step {training.steps} is the newest snapshot; that of step {complete} was complete"
    assert training.steps >= complete, said
    _compare(training, expected)
    for _ in range(2 * setting.backwards):
        loss = training.step()
        _compare(training, expected)
        assert loss == expected[training.steps][1], f"the loss of step {training.steps}"
    extra = {"step": training.steps}
    strata.snapshot(training.model, folder / SERIES, keep=setting.keep, extra=extra).wait()
    board["complete"] = training.steps
    if setting.saves:
        strata.save(training.model, folder / SAVED, extra=extra)
    strata.unwrap(training.model)
    assert not (left := list(_left_over(folder, setting.keep))), f"left over: {left}"


def _compare(training: Training, expected: list[tuple[bytes, float]]) -> None:
    assert training.digest() == expected[training.steps][0], (
        f"the state after {training.steps} steps"
    )


def _left_over(folder: Path, keep: int) -> Iterator[Path]:
    """Files that are part of no snapshot, no link to one and no checkpoint."""
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
