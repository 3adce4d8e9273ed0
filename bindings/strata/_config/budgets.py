"""Budgets of the tiers: those that the user gave, and for the others what the machine has free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import _core
from . import device
from .options import FREE_SHARE, Options
from .ranks import plans_of_all
from .sizes import TIERS, format_size, parse_budgets

if TYPE_CHECKING:
    from .._core import Config, Plan

DISK_SHARE = 0.9  # of free room that strata takes of its own accord
DEVICE_SHARE = 0.25  # of free host memory, where not everything fits
UNBOUNDED = 1 << 50

log = logging.getLogger("strata")


def tier_budgets(config: Config) -> dict[str, int]:
    """Bytes of each tier."""
    return {tier: config[f"{tier}_bytes"] for tier in TIERS}  # type: ignore[literal-required]


def choose_budgets(
    config: Config,
    given: dict[str, int],
    make_plan: Callable[[Config], Plan],
    gpu: int | None,
    options: Options,
) -> None:
    """Fills in the budgets: those given, and for the others what the machine has free. `gpu`: what
    the device has, where it has memory of its own; ranks share the rest."""
    if given.get("ssd") and not config["ssd_paths"]:
        raise ValueError("memory={'ssd': ...} needs ssd_path= as well")
    # 1. The SSD: only where a path is given, and then everything that rests may rest there.
    if config["ssd_paths"]:
        there = _default_ssd_bytes(config, options) // options.shared_by()
        config["ssd_bytes"] = given.get("ssd", there)
    # 2. Device and host: what the model needs, if the machine has it.
    free = options.free_host_bytes()
    if "device" not in given or "host" not in given:
        whole: Config = {**config, "device_bytes": UNBOUNDED, "host_bytes": UNBOUNDED}
        needs = plans_of_all(whole, make_plan)
        device_bytes = max(need["device_bytes"] for need in needs)
        host_bytes = max(need["host_bytes"] for need in needs)
        given.update(shares(given, device_bytes, host_bytes, free, gpu))
    config["device_bytes"], config["host_bytes"] = given["device"], given["host"]
    log.info(
        "budgets: device (%s) %s, host %s, ssd %s; memory free: %s",
        config["device"],
        format_size(config["device_bytes"]),
        _share_text(config["host_bytes"], options),
        _share_text(config["ssd_bytes"], options),
        format_size(free),
    )


def device_goal(config: Config, options: Options) -> int:
    """The device bytes that frames, activations and PyTorch's own memory may take together.

    Where the user gave none, what the machine has: on the host backend they share its memory.
    """
    if "device" in parse_budgets(options.memory):
        return config["device_bytes"]
    if (gpu := device.free_bytes(config["device"])) is not None:
        return max(config["device_bytes"], int(gpu * FREE_SHARE))
    free = options.free_host_bytes()
    return config["device_bytes"] + max(0, free - config["device_bytes"] - config["host_bytes"])


def shares(
    given: Mapping[str, int], device_wanted: int, host_wanted: int, free: int, gpu: int | None
) -> dict[str, int]:
    """`given` with budgets of device and host, in bytes: what is wanted, where that is there.
    `free`: of host memory, which a device without memory of its own (`gpu` None) shares."""
    if gpu is not None:
        device_bytes, host_bytes = min(device_wanted, int(gpu * FREE_SHARE)), min(host_wanted, free)
        return {"device": device_bytes, "host": host_bytes, **given}
    taken = min(given.get("device", 0), device_wanted) + min(given.get("host", 0), host_wanted)
    left = max(0, free - taken)
    device_bytes, host_bytes = min(device_wanted, left), min(host_wanted, left)
    if not {"device", "host"} & given.keys() and device_wanted + host_wanted > left:
        device_bytes = min(device_wanted, int(left * DEVICE_SHARE))
        host_bytes = min(host_wanted, left - device_bytes)
    return {"device": device_bytes, "host": host_bytes, **given}


def _default_ssd_bytes(config: Config, options: Options) -> int:
    """Room for all that rests, of whatever dtype; and for snapshots, which hold what is trained
    once each, and what is frozen once."""
    most = _core.element_bytes("float16", "float32", sums=True)  # of all dtypes
    of_trained = sum(most.values())
    of_frozen = _core.element_bytes("float32", "float32", sums=True)["param"]
    whole_pages = len(config["units"]) * (64 << 20)
    trained = sum(spec["numel"] for spec in config["params"] if spec["trainable"])
    frozen = sum(spec["numel"] for spec in config["params"]) - trained
    need = of_trained * trained + of_frozen * frozen + whole_pages
    if kept := config["snapshots"]:
        of_each = of_trained - most["grad"]
        need += (kept + 1) * (of_each * trained + whole_pages) + of_frozen * frozen + whole_pages
    return min(need, int(options.free_disk_bytes() * DISK_SHARE))


def _share_text(size: int, options: Options) -> str:
    """A budget, and where ranks share the machine's, of what it is a part."""
    count = options.shared_by()
    if count == 1 or size == 0:
        return format_size(size)
    return f"{format_size(size)} of {format_size(size * count)} (this rank, of {count})"
