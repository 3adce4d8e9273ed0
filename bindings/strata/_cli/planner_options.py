"""The options of `strata plan`, `estimate` and `io-tune`: a machine, and what is asked of it.
Needs no torch.

options = parse(plan_parser(description), arguments)
budgets, wishes = budgets_of(options.memory, page_bytes), wishes_of("auto", None)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .. import _core
from .._config.choices import check_split, worded
from .._config.sizes import parse_budgets
from .options import ENDURANCE, MODEL, Parser, adder

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
    """What the step would have, and what is wanted of the planner."""
    group = parser.add_argument_group("what it would have")
    add = adder(group)
    group.add_argument(
        "--memory",
        required=True,
        type=worded(_budgets),
        metavar="device=SIZE,host=SIZE[,ssd=SIZE]",
        help="budgets, such as device=8GiB,host=24GiB,ssd=200GiB",
    )
    _add_device(add, "whose figures are taken where none are told")
    for tier, word in (("upload", "host to device"), ("download", "device to host")):
        add(
            f"--{tier}-speed",
            f"of copies from {word}, such as 25GB/s (default: this machine's)",
        )
    for way in ("read", "write"):
        add(f"--ssd-{way}-speed", "of all disks together (default: measured at --ssd-path)")
    add("--ssd-path", "folders on the disks to measure", default=[])
    add("--ssd-endurance", ENDURANCE)
    add(
        "--update-speed",
        "parameters the optimizer updates in a second, such as 2G (default: this machine's)",
    )
    add("--workers", "threads that update parameters")
    add("--io-engine", "default: auto", default="auto")
    add = adder(parser.add_argument_group("what is asked of it"))
    add("--steps", "of the run, to say what it takes")
    add("--activations", "default: auto", choices=ACTIVATIONS, default="auto")
    add("--split", "slices of the batch (default: auto)", metavar="K")
    add("--json", "print one JSON object", action="store_true")


def plan_parser(description: str | None) -> Parser:
    """The options of `strata plan`."""
    parser = Parser(prog="strata plan", description=description)
    add = adder(parser.add_argument_group("the step"))
    add("--trace", "a recorded step", required=True, metavar="FILE")
    add("--tokens-scale", "plan for a batch so many times as large", default=1.0)
    add_machine(parser)
    adder(parser)(
        "--compute-speed",
        "of the device, in multiples of the one that the step was recorded on",
        default=1.0,
    )
    return parser


def estimate_parser(description: str | None) -> Parser:
    """The options of `strata estimate`."""
    parser = Parser(prog="strata estimate", description=description)
    add = adder(parser.add_argument_group("the model and its step"))
    add(
        "--model",
        "a Transformers folder or config.json (weights are not read), or a size such as llama-1b",
        required=True,
        metavar=MODEL,
    )
    add("--batch", "sequences (default: 1)", default=1)
    add("--sequence", "tokens of each (default: 2048)", default=2048)
    add("--dtype", "default: bfloat16", default="bfloat16")
    add(
        "--update",
        "on_step, in_backward or lock-free:S (default: on_step)",
        default="on_step",
    )
    add("--state-dtype", "of AdamW's moments (default: float32)", default="float32")
    add(
        "--flops",
        "FLOP/s that the device achieves, such as 400T (default: as --device is measured)",
    )
    add(
        "--device-bandwidth",
        "of the device's memory, such as 3TB/s (default: as --device is measured)",
    )
    add("--page-size", "default: chosen")
    add_machine(parser)
    return parser


def io_tune_parser(description: str | None) -> Parser:
    """The options of `strata io-tune`."""
    parser = Parser(prog="strata io-tune", description=description)
    add = adder(parser)
    add("--ssd-path", "folders on disks", default=[])
    add(
        "--page-size",
        "of the calibration that is remembered (default: 4MiB)",
        default=4 << 20,
    )
    add("--io-engine", "default: auto", default="auto")
    add("--workers", "threads that update parameters")
    _add_device(add, "whose links are measured")
    return parser


def _add_device(add: Callable[..., None], what: str) -> None:
    add(
        "--device",
        f"{what}: auto, host, cuda or cuda:N (default: auto, a GPU where one can be used)",
        default="auto",
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
    return _core.paper_budgets(page_bytes, given["device"], given["host"], given["ssd"], grads_rest)


def wishes_of(activations: str, split: int | None) -> Wishes:
    """What --activations and --split force."""
    return _core.Wishes(
        activation=ACTIVATIONS[activations],  # type: ignore[arg-type]
        slices=split or 0,
        may_split=activations == "auto",
    )


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
