"""Runs parts, one after the other, within the time that there is. Whatever a part starts ends with
it, and with the run: see guard.py.

    for result in run_all(parts, root, env, logs, Clock(9), done=set()):
        print(result.part, result.status)
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .parts import Part

Status = Literal[
    "ok", "failed", "too slow", "left out", "cut off", "not begun", "done before", "failed before"
]
MINUTE = 60
MINUTES_MIN = 0.5  # to begin what goes on another time
SPARE_SECONDS = 10  # of the time that is asked for: to end a part and to keep what came of it
GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True)
class Result:
    """How a part went."""

    part: str
    status: Status
    seconds: float
    note: str = ""


class Clock:
    """How much time is left. `minutes`: in all; None: as much as it takes."""

    def __init__(self, minutes: float | None) -> None:
        seconds = None if minutes is None else minutes * MINUTE - SPARE_SECONDS
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def bounded(self) -> bool:
        """Whether there is an end."""
        return self._end is not None

    def left(self) -> float:
        """Seconds until the end."""
        return float("inf") if self._end is None else self._end - time.monotonic()


def run_all(
    parts: Sequence[Part],
    root: Path,
    env: Mapping[str, str],
    logs: Path,
    clock: Clock,
    done: Mapping[str, bool],
    begin: Callable[[Part], None] = lambda part: None,
) -> Iterator[Result]:
    """Runs part after part, but for those that were run before (`done`: whether they went well).
    One that failed leaves out those that need it, and no others; one that cannot end in time is
    not begun. `begin` is called before each that is run.
    """
    went_well: set[str] = set()
    for part in parts:
        missing = [name for name in part.needs if name not in went_well]
        if missing:
            yield Result(part.name, "left out", 0.0, f"needs: {', '.join(missing)}")
            continue
        if part.name in done and not part.always:
            if done[part.name]:
                went_well.add(part.name)
                yield Result(part.name, "done before", 0.0)
            else:
                yield Result(part.name, "failed before", 0.0, "--only and its name run it again")
            continue
        minutes = MINUTES_MIN if part.goes_on else part.minutes
        if clock.left() < minutes * MINUTE:
            note = f"takes up to {minutes:g} minutes, {max(0, clock.left()) / MINUTE:.1f} are left"
            yield Result(part.name, "not begun", 0.0, note)
            continue
        begin(part)
        result = run_part(part, root, env, logs / f"{part.name}.log", clock)
        if result.status == "ok":
            went_well.add(part.name)
        yield result


def run_part(
    part: Part,
    root: Path,
    env: Mapping[str, str],
    log: Path,
    clock: Clock,
) -> Result:
    """Runs a part to its end, or to the end of its time; all that it prints goes to the log at
    once, behind what an earlier run left there."""
    begin = time.monotonic()
    until = begin + min(part.limit * MINUTE, clock.left())
    with log.open("a") as sink:
        for step in part.steps:
            print("$", *step, file=sink, flush=True)
            code = run_step(step, root, {**env, **part.variables}, sink.fileno(), until)
            seconds = time.monotonic() - begin
            if code is None and part.goes_on and clock.left() <= 0:
                return Result(part.name, "cut off", seconds, "the next run goes on with it")
            if code is None:
                note = f"not within {(until - begin) / MINUTE:.2g} minutes"
                return Result(part.name, "too slow", seconds, note)
            if code != 0:
                return Result(part.name, "failed", seconds, f"exit status {code}, see {log}")
    return Result(part.name, "ok", seconds)


def run_step(
    command: Sequence[str],
    root: Path,
    env: Mapping[str, str],
    sink: int,
    until: float,
) -> int | None:
    """The exit status of a command; None where it was ended at `until`. Nothing that it started is
    left, whatever ends the run: the guard ends all of it when the pipe to it closes."""
    life, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, str(GUARD), str(life), *command],
            cwd=root,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            pass_fds=[life],
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(life)
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        os.close(ours)
        process.wait()
