"""The options that `strata plan` and `strata estimate` share: a machine, and what is asked of it.

parser = Parser(prog="strata plan")
add_machine(parser)
options = parser.parse_args(arguments)
costs, budgets = costs_of(options, page_bytes), budgets_of(options, page_bytes)
    wishes = wishes_of(options)
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from . import configure, device
from .calibrate import Calibration, Setup, calibration
from .finetune_options import ENGINES, Parser
from .paper import staging_bytes
from .sizes import parse_budgets, parse_size

if TYPE_CHECKING:
    from ._core import Budgets, Costs, DtypeName, Wishes

ACTIVATIONS = {"auto": None, "keep": "keep", "swap": "swap_host", "recompute": "recompute"}
# What an option says, and the field of Costs that it stands for.
SPEEDS = {
    "upload_speed": "upload_bytes_s",
    "download_speed": "download_bytes_s",
    "ssd_read_speed": "read_bytes_s",
    "ssd_write_speed": "write_bytes_s",
    "update_speed": "update_elements_s",
}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

T = TypeVar("T")


def add_machine(parser: Parser) -> None:
    """What the step would have, and what is asked of the planner."""
    add = parser.add_argument_group("what it would have").add_argument
    add(
        "--memory",
        required=True,
        type=worded(_budgets),
        metavar="device=SIZE,host=SIZE[,ssd=SIZE]",
        help="budgets, such as device=8GiB,host=24GiB,ssd=200GiB",
    )
    add_device(add, "whose figures are taken where none are told")
    for tier, word in (("upload", "host to device"), ("download", "device to host")):
        add(
            f"--{tier}-speed",
            type=worded(parse_speed),
            metavar="SPEED",
            help=f"of copies from {word}, such as 25GB/s (default: this machine's)",
        )
    for way in ("read", "write"):
        add(
            f"--ssd-{way}-speed",
            type=worded(parse_speed),
            metavar="SPEED",
            help="of all disks together (default: measured at --ssd-path)",
        )
    add("--ssd-path", nargs="+", metavar="DIR", help="folders on the disks to measure")
    add(
        "--update-speed",
        type=worded(parse_count),
        metavar="N",
        help="parameters the optimizer updates in a second, such as 2G (default: this machine's)",
    )
    add("--workers", type=worded(positive), metavar="N", help="threads that update parameters")
    add("--io-engine", choices=ENGINES, default="auto", help="default: auto")
    add = parser.add_argument_group("what is asked of it").add_argument
    add("--activations", choices=ACTIVATIONS, default="auto", help="default: auto")
    add("--split", type=worded(positive), metavar="K", help="slices of the batch (default: auto)")
    add("--json", action="store_true", help="print one JSON object")


def add_device(add: Callable[..., object], what: str) -> None:
    """--device; `what` it is here."""
    add(
        "--device",
        type=worded(device.parse),
        default="auto",
        metavar="NAME",
        help=f"{what}: auto, host, cuda or cuda:N (default: auto, a GPU where one can be used)",
    )


def budgets_of(options: argparse.Namespace, page_bytes: int) -> Budgets:
    """The budgets of --memory."""
    given = options.memory
    on_ssd = bool(given["ssd"])
    return {
        "page_bytes": page_bytes,
        "device_bytes": given["device"],
        "host_bytes": given["host"],
        "ssd_bytes": given["ssd"],
        "staging_bytes": staging_bytes(given["host"], page_bytes) if on_ssd else 0,
    }


def wishes_of(options: argparse.Namespace) -> Wishes:
    """What --activations and --split force."""
    return {
        "activation": ACTIVATIONS[options.activations],  # type: ignore[typeddict-item]
        "slices": options.split or 0,
        "may_split": options.activations == "auto",
        "on_device": None,
    }


def machine_of(
    options: argparse.Namespace, page_bytes: int, dtype: DtypeName = "bfloat16"
) -> Calibration:
    """What --*-speed says, and for the rest this machine with --device, as remembered or measured
    now. REQUIRES: options.device is what device.choose() made of it.

    Raises ValueError where an SSD is to be used and its speed is neither told nor to be measured,
    and StrataError where the device cannot be used.
    """
    paths = options.ssd_path or []
    for path in paths:
        if not Path(path).is_dir():
            raise ValueError(f"--ssd-path {path} is not a folder")
    told = {name: getattr(options, option) for option, name in SPEEDS.items()}
    ssd_told = options.ssd_read_speed is not None and options.ssd_write_speed is not None
    if options.memory["ssd"] and not paths and not ssd_told:
        raise ValueError(
            "an ssd budget needs --ssd-read-speed and --ssd-write-speed, or --ssd-path to measure"
        )
    workers = options.workers or configure.default_workers(options.device)
    setup = Setup(workers, page_bytes, paths, options.io_engine, dtype, options.device)
    found = calibration(setup)
    costs: dict[str, Any] = dict(found.costs)
    costs.update({name: float(value) for name, value in told.items() if value is not None})
    if ssd_told and not paths:
        costs["slow"] = _with_disk(costs["slow"])
    return dataclasses.replace(found, costs=cast("Costs", costs))


def _with_disk(slow: Any) -> Any:
    """Disks that were not measured: each way keeps some of its speed beside the other, as most
    drives do."""
    mixed = 0.6
    result = {lane: dict(row) for lane, row in slow.items()}
    result.setdefault("read", {})["write"] = mixed
    result.setdefault("write", {})["read"] = mixed
    return result


def parse_speed(text: str) -> int:
    """Bytes per second: "12GB/s". Raises ValueError."""
    return parse_size(re.sub(r"\s*/\s*s$", "", text.strip()))


def parse_count(text: str) -> float:
    """A number with k, M, G or T behind it: "2.5G", "989T". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kKmMgGtT]?)\s*", text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a number such as 500M or 2G")
    return float(match[1]) * COUNTS[match[2].lower()]


def parse_factor(text: str) -> float:
    """ "2x" or "0.5": a positive number. Raises ValueError."""
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise ValueError(f"{text!r} is not a factor such as 2x or 0.5")
    return factor


def positive(text: str) -> int:
    """A whole number from 1 on. Raises ValueError."""
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(text)


def _budgets(text: str) -> dict[str, int]:
    given: dict[str, str] = {}
    for part in text.split(","):
        tier, equals, size = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not a budget such as device=8GiB")
        given[tier.strip()] = size
    budgets = {"ssd": 0, **parse_budgets(given)}
    for tier in ("device", "host"):
        if tier not in budgets:
            raise ValueError(f"{text!r} has no {tier}= budget")
    return budgets


def page_size(text: str) -> int:
    """A power of two that pages can have. Raises ValueError."""
    size = parse_size(text)
    configure.check_page_size(size)
    return size


def worded(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse, which by itself hides what a ValueError says."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
