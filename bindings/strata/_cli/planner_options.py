"""The options of `strata plan`, `estimate` and `io-tune`: a machine, and what is asked of it.
Needs no torch.

options = parse(plan_parser(description), arguments)
budgets, wishes = budgets_of(options.memory, page_bytes), wishes_of("auto", None)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .._config.choices import DTYPES, IO_ENGINES, STATE_DTYPES, check_split, parse_device
from .._config.option_types import (
    folder,
    page_size,
    parse_count,
    parse_factor,
    positive,
    worded,
    workers,
)
from .._config.sizes import parse_budgets, parse_size, parse_speed
from .._config.update_modes import parse_update
from .._planning.forecast import staging_bytes
from .finetune_options import Parser

if TYPE_CHECKING:
    from .._core import Budgets, Wishes

ACTIVATIONS = {"auto": None, "keep": "keep", "swap": "swap_host", "recompute": "recompute"}
# What an option says, and the field of Costs that it stands for.
SPEEDS = {
    "upload_speed": "upload_bytes_s",
    "download_speed": "download_bytes_s",
    "ssd_read_speed": "read_bytes_s",
    "ssd_write_speed": "write_bytes_s",
    "update_speed": "update_elements_s",
}


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
    add_ssd_path(add, "folders on the disks to measure")
    add(
        "--ssd-endurance",
        type=worded(parse_size),
        metavar="SIZE",
        help="what the drives last for, all together (TBW on their data sheets), such as 600TB",
    )
    add(
        "--update-speed",
        type=worded(parse_count),
        metavar="N",
        help="parameters the optimizer updates in a second, such as 2G (default: this machine's)",
    )
    add("--workers", type=worded(workers), metavar="N", help="threads that update parameters")
    add("--io-engine", choices=IO_ENGINES, default="auto", help="default: auto")
    add = parser.add_argument_group("what is asked of it").add_argument
    add("--steps", type=worded(positive), metavar="N", help="of the run, to say what it takes")
    add("--activations", choices=ACTIVATIONS, default="auto", help="default: auto")
    add("--split", type=worded(positive), metavar="K", help="slices of the batch (default: auto)")
    add("--json", action="store_true", help="print one JSON object")


def plan_parser(description: str | None) -> Parser:
    """The options of `strata plan`."""
    parser = Parser(prog="strata plan", description=description)
    add = parser.add_argument_group("the step").add_argument
    add("--trace", required=True, metavar="FILE", help="a recorded step")
    add(
        "--tokens-scale",
        type=worded(parse_factor),
        default=1.0,
        metavar="X",
        help="plan for a batch so many times as large",
    )
    add_machine(parser)
    parser.add_argument(
        "--compute-speed",
        type=worded(parse_factor),
        default=1.0,
        metavar="X",
        help="of the device, in multiples of the one that the step was recorded on",
    )
    return parser


def estimate_parser(description: str | None) -> Parser:
    """The options of `strata estimate`."""
    parser = Parser(prog="strata estimate", description=description)
    add = parser.add_argument_group("the model and its step").add_argument
    add(
        "--model",
        required=True,
        metavar="DIR|CONFIG|SIZE",
        help="a Transformers folder or config.json (weights are not read), or a size such as "
        "llama-1b",
    )
    add("--batch", type=worded(positive), default=1, metavar="N", help="sequences (default: 1)")
    add(
        "--sequence",
        type=worded(positive),
        default=2048,
        metavar="N",
        help="tokens of each (default: 2048)",
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add(
        "--update",
        type=worded(parse_update),
        default="on_step",
        metavar="MODE",
        help="on_step, in_backward or lock-free:S (default: on_step)",
    )
    add(
        "--state-dtype",
        choices=STATE_DTYPES,
        default="float32",
        help="of AdamW's moments (default: float32)",
    )
    add(
        "--flops",
        type=worded(parse_count),
        metavar="N",
        help="FLOP/s that the device achieves, such as 400T (default: as --device is measured)",
    )
    add(
        "--device-bandwidth",
        type=worded(parse_speed),
        metavar="SPEED",
        help="of the device's memory, such as 3TB/s (default: as --device is measured)",
    )
    add("--page-size", type=worded(page_size), metavar="SIZE", help="default: chosen")
    add_machine(parser)
    return parser


def io_tune_parser(description: str | None) -> Parser:
    """The options of `strata io-tune`."""
    parser = Parser(prog="strata io-tune", description=description)
    add = parser.add_argument
    add_ssd_path(add, "folders on disks")
    add(
        "--page-size",
        type=worded(page_size),
        default=4 << 20,
        metavar="SIZE",
        help="of the calibration that is remembered (default: 4MiB)",
    )
    add("--io-engine", choices=IO_ENGINES, default="auto", help="default: auto")
    add("--workers", type=worded(workers), metavar="N", help="threads that update parameters")
    add_device(add, "whose links are measured")
    return parser


def add_ssd_path(add: Callable[..., object], what: str) -> None:
    """--ssd-path; `what` it is here."""
    add("--ssd-path", nargs="+", default=[], type=worded(folder), metavar="DIR", help=what)


def add_device(add: Callable[..., object], what: str) -> None:
    """--device; `what` it is here."""
    add(
        "--device",
        type=worded(parse_device),
        default="auto",
        metavar="NAME",
        help=f"{what}: auto, host, cuda or cuda:N (default: auto, a GPU where one can be used)",
    )


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses, and refuses what cannot be asked of the planner together."""
    options = parser.parse_args(arguments)
    try:
        check_split(options.split, options.activations)
    except ValueError as error:
        parser.error(str(error))
    return options


def budgets_of(given: Mapping[str, int], page_bytes: int, grads_rest: bool = True) -> Budgets:
    """Budgets by tier, as the planner takes them. `grads_rest`: in pages, until the step ends."""
    on_ssd = bool(given["ssd"])
    return {
        "page_bytes": page_bytes,
        "device_bytes": given["device"],
        "host_bytes": given["host"],
        "ssd_bytes": given["ssd"],
        "staging_bytes": staging_bytes(given["host"], page_bytes) if on_ssd else 0,
        "grads_rest": grads_rest,
    }


def wishes_of(activations: str, split: int | None) -> Wishes:
    """What --activations and --split force."""
    return {
        "activation": ACTIVATIONS[activations],  # type: ignore[typeddict-item]
        "slices": split or 0,
        "may_split": activations == "auto",
        "on_device": None,
    }


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
