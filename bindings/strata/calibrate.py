"""How fast this machine is: every lane alone, and what lanes do to each other. Measured once in
about three seconds, then remembered in the user's cache folder.

    found = calibrate.calibration(Setup(workers=1, ssd_paths=["/mnt/nvme"], page_bytes=4 << 20))
    found.costs["read_bytes_s"], found.costs["slow"]["compute"]["update"], found.flops_s

Format of the file calibration-<hash>.json: {"key": what it was measured with, "calibration": the
fields of Calibration}. A file that cannot be read, or whose key is another, is measured again.

Note [What is measured]. Links and the optimizer are the core's own engines at work (SsdProbe,
CopyProbe, UpdateProbe); computation is a feed-forward block's forward and backward on torch's
threads. Two lanes together run at the same time, each on a thread of its own: what is left of each
one's speed is its entry in `slow`. The SSD is measured through a file small enough for a drive's
fast cache, so a drive that slows down once that is full is slower in a long run than told here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from . import _core, machine
from .compute_probe import Compute, matmul_flops, slice_seconds
from .errors import StrataError

if TYPE_CHECKING:
    from ._core import Costs, DtypeName, LaneName

VERSION = 3  # of what is measured: another one is measured again
ALONE_SECONDS = 0.1  # twice, and the better one counts
TOGETHER_SECONDS = 0.25
ROUNDS = 3  # of what is measured more than once
SSD_BYTES = 256 << 20
COPY_BYTES = 96 << 20
UPDATE_BYTES = 96 << 20
SLOWEST = 0.05  # of its speed that a lane keeps beside another, at least
LANES: tuple[LaneName, ...] = ("compute", "upload", "download", "read", "write", "update")
# What a lane is taken to do where it cannot be measured: a modest machine.
TYPICAL: dict[LaneName, float] = {
    "upload": 8e9,
    "download": 8e9,
    "read": 1.5e9,
    "write": 1e9,
    "update": 5e8,
}
TYPICAL_TRANSFER_SECONDS = 2e-5
COST_NAMES = {
    "compute_scale",
    *(f"{lane}_bytes_s" for lane in ("upload", "download", "read", "write")),
    "update_elements_s",
    "transfer_seconds",
    "slice_seconds",
    "slow",
}

Run = Callable[[float], float]  # seconds to be busy → FLOP, bytes or elements per second

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Setup:
    """What a calibration depends on, beside the machine."""

    workers: int
    page_bytes: int
    ssd_paths: Sequence[str] = ()
    io_engine: str = "auto"
    dtype: DtypeName = "bfloat16"

    def key(self) -> dict[str, Any]:
        """All that a calibration depends on. Folders of one file system are the same disk."""
        return {
            "version": VERSION,
            "processor": processor(),
            "processors": machine.processors(),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "workers": self.workers,
            "page_bytes": self.page_bytes,
            "disks": sorted(_disk(path) for path in self.ssd_paths),
            "io_engine": self.io_engine if self.ssd_paths else "",
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Calibration:
    """What was found."""

    costs: Costs
    flops_s: float  # of large matrix products
    typical: list[LaneName] = dataclasses.field(default_factory=list)  # could not be measured


def costs(
    workers: int,
    ssd_paths: Sequence[str],
    page_bytes: int,
    io_engine: str,
    refresh: bool = False,
    dtype: DtypeName = "bfloat16",
) -> Costs:
    """The costs of this machine: remembered, or measured now. Never raises for what it cannot
    measure: that is logged, and taken from a modest machine."""
    return calibration(Setup(workers, page_bytes, ssd_paths, io_engine, dtype), refresh).costs


def calibration(setup: Setup, refresh: bool = False) -> Calibration:
    """As costs(), with what else was found."""
    key = setup.key()
    text = json.dumps(key, sort_keys=True)
    file = cache_folder() / f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not refresh and (known := _load(file, key)) is not None:
        return known
    begin = time.perf_counter()
    found = measure(setup)
    log.info("calibrated this machine in %.1f s", time.perf_counter() - begin)
    if not found.typical:  # what was not measured may be measurable next time
        _save(file, key, found)
    return found


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/strata, or ~/.cache/strata."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "strata"
    except RuntimeError:  # a user without a home
        return Path("/nonexistent/strata")


def measure(setup: Setup) -> Calibration:
    """Measures everything now."""
    typical: list[LaneName] = []

    def attempt(lanes: Sequence[LaneName], make: Callable[[], Any]) -> Any:
        try:
            return make()
        except StrataError as error:
            log.warning(
                "cannot measure %s, typical values are used: %s", " and ".join(lanes), error
            )
            typical.extend(lanes)
            return None

    compute = Compute(setup.dtype)
    copies = attempt(("upload", "download"), lambda: _core.CopyProbe(setup.page_bytes, COPY_BYTES))
    update = attempt(
        ("update",),
        lambda: _core.UpdateProbe(
            setup.workers, setup.dtype, setup.page_bytes, UPDATE_BYTES, torch.get_num_threads()
        ),
    )
    ssd = None
    if setup.ssd_paths:
        ssd = attempt(
            ("read", "write"),
            lambda: _core.SsdProbe(
                list(setup.ssd_paths), setup.page_bytes, setup.io_engine, SSD_BYTES
            ),
        )
    alone, slow = _measure_lanes(compute, copies, update, ssd, attempt)
    speed = {**TYPICAL, **alone}
    return Calibration(
        costs={
            "compute_scale": 1.0,
            "upload_bytes_s": speed["upload"],
            "download_bytes_s": speed["download"],
            "read_bytes_s": speed["read"] if setup.ssd_paths else 0.0,
            "write_bytes_s": speed["write"] if setup.ssd_paths else 0.0,
            "update_elements_s": speed["update"],
            "transfer_seconds": copies.transfer_seconds() if copies else TYPICAL_TRANSFER_SECONDS,
            "slice_seconds": slice_seconds(),
            "slow": slow,
        },
        flops_s=matmul_flops(setup.dtype),
        typical=typical,
    )


def _measure_lanes(
    compute: Compute, copies: Any, update: Any, ssd: Any, attempt: Callable[..., Any]
) -> tuple[dict[LaneName, float], dict[LaneName, dict[LaneName, float]]]:
    """The speed of every lane alone, and the part of it that is left beside another."""
    runs: dict[LaneName, Run] = {"compute": compute.run}
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


def processor() -> str:
    """What this machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _disk(path: str) -> str:
    """The file system that a folder lies on: its device and where it is mounted."""
    place = Path(path).absolute()
    mount = next(p for p in [place, *place.parents] if p.is_mount() or p == p.parent)
    return f"{os.stat(path).st_dev}:{mount}"


def _load(file: Path, key: dict[str, Any]) -> Calibration | None:
    try:
        stored = json.loads(file.read_text())
        if stored["key"] != key:
            return None
        found = Calibration(**stored["calibration"])
        _check(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("calibration file %s is not usable, measuring again: %r", file, error)
        return None
    return found


def _check(found: Calibration) -> None:
    """Raises where a stored calibration is not what _save() stores."""
    speeds = {name: value for name, value in found.costs.items() if name != "slow"}
    values = [found.flops_s, *speeds.values()]
    for lane, row in found.costs["slow"].items():
        if lane not in LANES or not set(row) <= set(LANES):
            raise ValueError(f"unknown lane in {lane}: {row}")
        values += row.values()
    if set(found.costs) != COST_NAMES:
        raise ValueError(f"fields {sorted(set(found.costs) ^ COST_NAMES)}")
    if not all(isinstance(value, float) and 0 <= value < 1e18 for value in values):
        raise ValueError("a value is not a speed")


def _save(file: Path, key: dict[str, Any], found: Calibration) -> None:
    text = json.dumps({"key": key, "calibration": dataclasses.asdict(found)}, indent=2)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n")
        partial.replace(file)
    except OSError as error:
        log.info("the calibration is not remembered: %s", error)
