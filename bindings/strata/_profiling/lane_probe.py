"""The lanes of a step at work: how fast each is alone, and what is left of it beside another.

    alone, slow = measure_lanes(compute, copies, update, ssd, attempt)
    alone["upload"], slow["compute"]["update"]

Two lanes together run at the same time, each on a thread of its own: what is left of each one's
speed is its entry in `slow`. Computation always is the caller's thread, and on a GPU the stream
that is current there; copies are the core's, on streams of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from .compute_probe import Compute

if TYPE_CHECKING:
    from .._core import CopyProbe, LaneName, SsdProbe, UpdateProbe

ALONE_SECONDS = 0.1  # as often as ROUNDS says
TOGETHER_SECONDS = 0.25
ROUNDS = 3  # of what is measured more than once
SLOWEST = 0.05  # of its speed that a lane keeps beside another, at least
LANES: tuple[LaneName, ...] = ("compute", "upload", "download", "read", "write", "update")

Run = Callable[[float], float]  # seconds to be busy → FLOP, bytes or elements per second
# Names of lanes, and what is to be done with them → its result; None where it cannot be done.
Attempt = Callable[..., Any]


def measure_lanes(
    compute: Compute | None,
    copies: CopyProbe | None,
    update: UpdateProbe | None,
    ssd: SsdProbe | None,
    attempt: Attempt,
) -> tuple[dict[LaneName, float], dict[LaneName, dict[LaneName, float]]]:
    """The speed of every lane alone, and the part of it that is left beside another."""
    runs: dict[LaneName, Run] = {}
    if compute is not None:
        runs["compute"] = compute.run
    if copies is not None:
        runs["upload"] = lambda seconds: copies.run("in", seconds)[0]
        runs["download"] = lambda seconds: copies.run("out", seconds)[1]
    if update is not None:
        runs["update"] = update.run
    if ssd is not None:
        runs["read"] = lambda seconds: ssd.run("in", seconds)[0]
        runs["write"] = lambda seconds: ssd.run("out", seconds)[1]
    alone: dict[LaneName, float] = {}
    for lane in list(runs):
        if (speed := attempt((lane,), lambda run=runs[lane]: _typical(run))) is None:
            del runs[lane]  # a disk that failed
        else:
            alone[lane] = speed

    slow: dict[LaneName, dict[LaneName, float]] = {lane: {} for lane in LANES}
    for first, second, both in _pairs(runs, copies, ssd):
        speeds = attempt((first, second), both)
        if speeds is None:
            continue
        for lane, beside, speed in ((first, second, speeds[0]), (second, first, speeds[1])):
            slow[lane][beside] = min(1.0, max(SLOWEST, speed / alone[lane]))
    # Copies of both ways are the same work to everybody else.
    for lane in ("compute", "read", "write", "update"):
        if "upload" in slow[lane]:
            slow[lane]["download"] = slow[lane]["upload"]
            slow["download"][lane] = slow["upload"][lane]
    return alone, slow


def _typical(run: Run) -> float:
    """The speed of a lane alone: the median, because lanes together are measured so too."""
    return median(run(ALONE_SECONDS) for _ in range(ROUNDS))


def _pairs(
    runs: Mapping[LaneName, Run], copies: Any, ssd: Any
) -> list[tuple[LaneName, LaneName, Callable[[], tuple[float, float]]]]:
    """Every two lanes that are measured together."""
    pairs: list[tuple[LaneName, LaneName, Callable[[], tuple[float, float]]]] = []
    if "upload" in runs:
        pairs.append(("upload", "download", lambda: copies.run("both", TOGETHER_SECONDS)))
    if "read" in runs and "write" in runs:
        pairs.append(("read", "write", lambda: ssd.run("both", TOGETHER_SECONDS)))
    own: list[LaneName] = [lane for lane in LANES if lane in runs and lane != "download"]
    for i, first in enumerate(own):
        for second in own[i + 1 :]:
            if (first, second) == ("read", "write"):
                continue
            # What computation loses decides most: it is measured more than once.
            rounds = ROUNDS if first == "compute" else 1
            pairs.append(
                (first, second, lambda a=runs[first], b=runs[second], n=rounds: together(a, b, n))  # type: ignore[misc]
            )
    return pairs


def together(first: Run, second: Run, rounds: int = 1) -> tuple[float, float]:
    """The speeds of two lanes at the same time: `first` on this thread, `second` beside it. The
    medians of some rounds."""
    speeds = [_together_once(first, second) for _ in range(rounds)]
    return median(speed[0] for speed in speeds), median(speed[1] for speed in speeds)


def _together_once(first: Run, second: Run) -> tuple[float, float]:
    ready = threading.Barrier(2)
    speeds: list[float] = []
    errors: list[BaseException] = []

    def beside() -> None:
        try:
            ready.wait()
            speeds.append(second(TOGETHER_SECONDS))
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=beside, name="strata-calibrate")
    thread.start()
    ready.wait()
    try:
        speed = first(TOGETHER_SECONDS)
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return speed, speeds[0]
