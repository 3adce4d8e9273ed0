"""How fast this machine is: every lane alone, and what lanes do to each other. Measured once in
about three seconds, then remembered in the user's cache folder.

    setup = Setup(workers=1, page_bytes=4 << 20, ssd_paths=["/mnt/nvme"], device="cuda:0")
    found = calibrate.calibration(setup)
    found.costs.read_bytes_s, found.costs.slow["compute"]["update"], found.flops_s

Format of the file calibration-<hash>.json: {"key": what it was measured with, "calibration": the
fields of Calibration}. A file that cannot be read, or whose key is another, is measured again.

Note [What is measured]. Links and the optimizer are the core's own engines at work (SsdProbe,
CopyProbe, UpdateProbe), and so is what makes values of codes on their way to the host's frames;
computation is a feed-forward block's forward and backward on torch's threads, or on the GPU.
probes.py runs them alone and together. The optimizer's lane is the processor's, also beside a GPU.
The SSD is measured through a file small enough for a drive's fast cache, so a drive that slows down
once that is full is slower in a long run than told here.
Folders of one file system count as one disk. Most figures are medians of three short windows, so
they are as good as the machine was quiet. Copies of a GPU need 24 MiB of pages beside the device
budget; without room for them typical values are used, a warning says so, and the next run measures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._config import device, machine
from .._config.choices import SPEED_OF
from .._config.device import compute_threads
from .._errors import StrataError
from .._schema import Form, parsed
from .probes import (
    LANES,
    Compute,
    decode_speed,
    matmul_flops,
    measure_lanes,
    memory_bandwidth,
    slice_seconds,
)

if TYPE_CHECKING:
    from .._core import Costs, DtypeName, LaneName

VERSION = 5  # of what is measured: another one is measured again
NOT_MEASURED = ("landing_waits", "updates_first")  # of costs: how a session works
SSD_BYTES = 256 << 20
COPY_BYTES = 96 << 20
UPDATE_BYTES = 96 << 20
# What a lane is taken to do where it cannot be measured: a modest machine.
TYPICAL: dict[LaneName, float] = {
    "upload": 8e9,
    "download": 8e9,
    "read": 1.5e9,
    "write": 1e9,
    "update": 5e8,
}
TYPICAL_TRANSFER_SECONDS = 2e-5
TYPICAL_COMPUTING = (1e13, 1e-4, 3e11)  # of a GPU without memory for a probe

log = logging.getLogger("strata")


@dataclass(frozen=True)
class Setup:
    """What a calibration depends on, beside the machine."""

    workers: int
    page_bytes: int
    ssd_paths: Sequence[str] = ()
    io_engine: str = "auto"
    dtype: DtypeName = "bfloat16"
    device: str = device.HOST  # the core's name

    def key(self) -> dict[str, Any]:
        """All that a calibration depends on. Folders of one file system are the same disk. Raises
        StrataError where the device cannot be used."""
        return {
            "version": VERSION,
            "processor": machine.processor_name(),
            "processors": machine.processors(),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "workers": self.workers,
            "page_bytes": self.page_bytes,
            "disks": sorted(_disk(path) for path in self.ssd_paths),
            "io_engine": self.io_engine if self.ssd_paths else "",
            "dtype": self.dtype,
            "device": self.device,
            "gpu": device.description(self.device),
            "cuda": "" if self.device == device.HOST else str(torch.version.cuda),
        }


@dataclass(frozen=True)
class Calibration:
    """What was found."""

    costs: Costs
    flops_s: float  # of large matrix products
    memory_bytes_s: float  # of the device's memory, reading and writing
    typical: list[LaneName] = dataclasses.field(default_factory=list)  # could not be measured


@dataclass(frozen=True)
class Stored:
    """What a file holds."""

    key: dict[str, Any]  # what it was measured with
    calibration: Calibration


STORED = Form(Stored, {"Costs": _core.Costs, "LaneName": str})


def typical_costs() -> Costs:
    """Of a modest machine: for what does not depend on speeds."""
    return _costs(TYPICAL, TYPICAL_TRANSFER_SECONDS, TYPICAL_COMPUTING[1], {})


def _costs(
    speeds: Mapping[LaneName, float], transfer: float, each_slice: float, slow: Any
) -> Costs:
    """`speeds` by lane, `transfer` and `each_slice` in seconds, `slow` as Costs has it."""
    named: dict[str, Any] = {SPEED_OF[lane]: speeds[lane] for lane in LANES if lane in SPEED_OF}
    return _core.Costs(
        compute_scale=1.0, transfer_seconds=transfer, slice_seconds=each_slice, slow=slow, **named
    )


def costs(setup: Setup, refresh: bool = False) -> Costs:
    """The costs of this machine: remembered, or measured now. What cannot be measured is logged,
    and taken from a modest machine. Raises StrataError where the device cannot be used at all."""
    return calibration(setup, refresh).costs


def calibration(setup: Setup, refresh: bool = False) -> Calibration:
    """As costs(), with everything else that was measured."""
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
    there = device.torch_device(setup.device)

    def attempt(lanes: Sequence[LaneName], make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (StrataError, torch.OutOfMemoryError) as error:
            log.warning(
                "cannot measure %s, typical values are used: %s", " and ".join(lanes), error
            )
            typical.extend(lanes)
            return None

    compute = attempt(("compute",), lambda: Compute(setup.dtype, there))
    paths, page = list(setup.ssd_paths), setup.page_bytes
    left = compute_threads(setup.device)
    copies = attempt(
        ("upload", "download"), lambda: _core.CopyProbe(page, COPY_BYTES, setup.device)
    )
    update = attempt(
        ("update",),
        lambda: _core.UpdateProbe(setup.workers, setup.dtype, page, UPDATE_BYTES, left),
    )
    ssd = None
    if paths:
        ssd = attempt(
            ("read", "write"), lambda: _core.SsdProbe(paths, page, setup.io_engine, SSD_BYTES)
        )
    alone, slow = measure_lanes(compute, copies, update, ssd, attempt)
    transfer = attempt(("upload", "download"), copies.transfer_seconds) if copies else None
    decode = None
    if copies and setup.device == device.HOST:
        decode = attempt(("upload",), partial(decode_speed, copies, setup.dtype))
    del compute, copies  # their memory is the next one's
    flops_s, each_slice, memory_bytes_s = (
        attempt(("compute",), lambda: _computing(setup.dtype, there)) or TYPICAL_COMPUTING
    )
    no_disk: dict[LaneName, float] = {} if setup.ssd_paths else {"read": 0.0, "write": 0.0}
    speed = {**TYPICAL, **alone, **no_disk}
    costs = _costs(speed, transfer or TYPICAL_TRANSFER_SECONDS, each_slice, slow)
    return Calibration(
        costs=costs.replace(decode_bytes_s=decode or 0.0),
        flops_s=flops_s,
        # The host's copies are inside the device's memory, and read and write it.
        memory_bytes_s=memory_bytes_s or 2 * speed["upload"],
        typical=sorted(set(typical), key=LANES.index),
    )


def _computing(dtype: DtypeName, there: torch.device) -> tuple[float, float, float]:
    """FLOP/s, seconds of a slice, and bytes per second of a GPU's memory; of the host 0."""
    bandwidth = memory_bandwidth(there) if there.type == "cuda" else 0.0
    return matmul_flops(dtype, there), slice_seconds(there), bandwidth


def _disk(path: str) -> str:
    """The file system that a folder lies on: its device and where it is mounted."""
    place = Path(path).absolute()
    mount = next(p for p in [place, *place.parents] if p.is_mount() or p == p.parent)
    return f"{os.stat(path).st_dev}:{mount}"


def _load(file: Path, key: dict[str, Any]) -> Calibration | None:
    try:
        stored = STORED.read(parsed(file.read_bytes()))
        if stored.key != key:
            return None
        _check(stored.calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("calibration file %s is not usable, measuring again: %r", file, error)
        return None
    return stored.calibration


def _check(found: Calibration) -> None:
    """Raises where a stored calibration is not what _save() stores."""
    speeds = found.costs.to_dict()
    for name in ("slow", *NOT_MEASURED):
        del speeds[name]  # shares, of known lanes
    values = [found.flops_s, found.memory_bytes_s, *speeds.values()]
    if not all(isinstance(value, float) and 0 <= value < 1e18 for value in values):
        raise ValueError("a value is not a speed")


def _save(file: Path, key: dict[str, Any], found: Calibration) -> None:
    costs = found.costs.to_dict()
    for name in NOT_MEASURED:
        del costs[name]
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)} | {"costs": costs}
    text = json.dumps({"key": key, "calibration": fields}, indent=2)
    partial = file.with_suffix(f".{secrets.token_hex(4)}")  # that nobody else can have
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "x") as opened:
            opened.write(text + "\n")
        partial.replace(file)
    except OSError as error:
        log.info("the calibration is not remembered: %s", error)
