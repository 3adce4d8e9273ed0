"""The command line's options: how each is parsed, what several commands take, and the parsers of
all commands except finetune: a machine, and what is asked of it. No torch.

    parser = Parser(prog="strata plan", description="...")
    add = adder(parser.add_argument_group("the step"))
    add("--batch", "sequences (default: 1)", default=1)

    options = plan_parser("...").parse(arguments)
    budgets, wishes = budgets_of(options.memory, page_bytes), wishes_of("auto", None)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import _core
from .._config.choices import (
    ACTIVATIONS,
    AS_IS,
    DTYPES,
    FORCED,
    FORMS,
    IO_ENGINES,
    RANKS_MAX,
    SPEED_OF,
    STATE_DTYPES,
    as_written,
    check_base,
    check_split,
    count,
    folder,
    fraction,
    number,
    page_size,
    parse_count,
    parse_device,
    parse_factor,
    positive,
    worded,
    workers,
)
from .._config.launched import rank_name
from .._config.sizes import parse_budgets, parse_some, parse_speed
from .._config.update_modes import parse_update
from .._errors import nearest_option
from .lora import parse_lora

if TYPE_CHECKING:
    from .._core import Budgets, Wishes

# What options take, and how help calls that; all others take any text.
_KINDS: tuple[tuple[Callable[[str], Any], str, tuple[str, ...]], ...] = (
    (positive, "N", ("--steps", "--batch", "--sequence", "--split", "--ranks")),
    (workers, "N", ("--workers",)),
    (count, "N", ("--snapshots",)),
    (parse_some, "SIZE", ("--ssd-endurance",)),
    (page_size, "SIZE", ("--page-size",)),
    (parse_speed, "SPEED", ("--upload-speed", "--download-speed", "--device-bandwidth")),
    (parse_speed, "SPEED", ("--ssd-read-speed", "--ssd-write-speed")),
    (parse_count, "N", ("--update-speed", "--flops")),
    (parse_factor, "X", ("--tokens-scale", "--compute-speed")),
    (parse_device, "NAME", ("--device",)),
    (parse_update, "MODE", ("--update",)),
    (as_written(parse_lora), "r=N[,...]", ("--lora",)),
    (folder, "DIR", ("--ssd-path",)),
)
KINDS = {name: (parse, metavar) for parse, metavar, names in _KINDS for name in names}
NUMBERS = (count, fraction, number, positive, workers)
CHOICES = {
    "--activations": ACTIVATIONS,
    "--dtype": DTYPES,
    "--frozen": (AS_IS, *FORMS),
    "--io-engine": IO_ENGINES,
    "--state-dtype": STATE_DTYPES,
}
SEVERAL = ("--ssd-path",)
MODEL = "DIR|CONFIG|SIZE"
# What help says of an option, whichever command takes it.
DEFAULT = "default: %(default)s"
DEVICES = "auto, host, cuda or cuda:N (default: %(default)s, a GPU where one can be used)"
ENDURANCE = "what the drives last for, all together (TBW on their data sheets), such as 600TB"
STATE_DTYPE = f"of AdamW's moments; shorter ones lose bits ({DEFAULT})"
UPDATE = (
    "on_step; in_backward: as soon as a unit's gradients are there; lock-free:S: the model may "
    f"compute with parameters up to S steps old ({DEFAULT})"
)
WORKERS = "threads that update parameters"


class Parser(argparse.ArgumentParser):
    """Names the nearest valid option where one is unknown, and takes none for another: beginnings
    of options are no options."""

    def __init__(self, **keywords: Any) -> None:
        """As argparse's."""
        super().__init__(**keywords, allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As parse_args(). Refuses options that contradict each other, too."""
        options = self.parse_args(arguments)
        try:
            check_split(getattr(options, "split", None), getattr(options, "activations", None))
            if hasattr(options, "frozen"):
                check_base(options.frozen, options.lora)
            if hasattr(options, "ranks"):
                _check_ranks(options.ranks)
                _check_ssd(options)
        except ValueError as error:
            self.error(str(error))
        return options

    def error(self, message: str) -> NoReturn:
        """Called by argparse for whatever cannot be parsed."""
        options = [o for action in self._actions for o in action.option_strings]
        unknown = [word for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and unknown:
            word = unknown[0].partition("=")[0]
            message = nearest_option(word, options, self.prog)
        super().error(f"{rank_name()}{message}")


def adder(group: Any, written: bool = False) -> Callable[..., None]:
    """What adds options to a parser or a group of one: add(name, help, **more), as argparse takes
    more. `written`: values that are no numbers stay the text that was given."""

    def add(name: str, help: str, parse: Callable[[str], Any] | None = None, **more: Any) -> None:
        if name in CHOICES:
            more = {"choices": CHOICES[name], **more}
        elif name in KINDS and parse is None:
            parse, metavar = KINDS[name]
            more = {"metavar": metavar, **more}
        if parse is not None:
            keep = written and parse not in NUMBERS
            more["type"] = worded(as_written(parse) if keep else parse)
        if name in SEVERAL:
            more["nargs"] = "+"
        group.add_argument(name, help=help, **more)

    return add


# The options that give the speed of a lane.
SPEEDS = {
    f"ssd_{lane}_speed" if lane in ("read", "write") else f"{lane}_speed": lane for lane in SPEED_OF
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
        help="budgets, such as device=8GiB,host=24GiB,ssd=200GiB; of several ranks each has the "
        "device budget, and all share the others",
    )
    add("--ranks", f"processes that train together ({DEFAULT})", default=1)
    add("--device", f"whose figures are taken where none are told: {DEVICES}", default="auto")
    own = "(default: this machine's)"
    add("--upload-speed", f"of copies from host to device, such as 25GB/s {own}")
    add("--download-speed", f"of copies from device to host, such as 25GB/s {own}")
    for way in ("read", "write"):
        add(f"--ssd-{way}-speed", "of all disks together (default: measured at --ssd-path)")
    add("--ssd-path", "folders on the disks to measure", default=[])
    add("--ssd-endurance", ENDURANCE)
    add("--update-speed", f"parameters the optimizer updates in a second, such as 2G {own}")
    add("--workers", WORKERS)
    add("--io-engine", DEFAULT, default="auto")
    add = adder(parser.add_argument_group("what is asked of it"))
    add("--steps", "of the run, to say what it takes")
    add("--activations", DEFAULT, default="auto")
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
    measured = "(default: as --device is measured)"
    add("--batch", f"sequences, of each rank ({DEFAULT})", default=1)
    add("--sequence", f"tokens of each ({DEFAULT})", default=2048)
    add("--dtype", DEFAULT, default="bfloat16")
    add("--update", UPDATE, default="on_step")
    add("--state-dtype", STATE_DTYPE, default="float32")
    add("--lora", "train adapters alone: r=8, or r=8,targets=q_proj+v_proj")
    add("--frozen", f"how what is not trained rests ({DEFAULT})", default=AS_IS)
    add("--flops", f"FLOP/s that the device achieves, such as 400T {measured}")
    add("--device-bandwidth", f"of the device's memory, such as 3TB/s {measured}")
    add("--page-size", "default: chosen")
    add("--snapshots", f"that are kept on the SSD, beside one that is taken ({DEFAULT})", default=0)
    add_machine(parser)
    return parser


def io_tune_parser(description: str | None) -> Parser:
    """The options of `strata io-tune`."""
    parser = Parser(prog="strata io-tune", description=description)
    add = adder(parser)
    add("--ssd-path", "folders on disks", default=[])
    add("--page-size", "of the calibration that is remembered (default: 4MiB)", default=4 << 20)
    add("--io-engine", DEFAULT, default="auto")
    add("--workers", WORKERS)
    add("--device", f"whose links are measured: {DEVICES}", default="auto")
    return parser


def report_parser(description: str | None) -> Parser:
    """The options of `strata report`."""
    parser = Parser(prog="strata report", description=description)
    parser.add_argument("report", metavar="REPORT.json", help="what Report.save() wrote")
    parser.add_argument("--html", metavar="FILE", type=Path, help="one page that needs no network")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="a trace of the last steps")
    return parser


def snapshots_parser(description: str | None) -> Parser:
    """The options of `strata snapshots`."""
    parser = Parser(prog="strata snapshots", description=description)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|copy|rm")
    shown = actions.add_parser("ls", help="those in a folder or on a drive, the oldest first")
    shown.add_argument(
        "place", type=Path, help="what strata.snapshot() was given, a Trainer's output, or a drive"
    )
    copied = actions.add_parser("copy", help="make one that needs no drive but its own folder's")
    copied.add_argument("snapshot", type=Path, help="the folder of a step; of a series the newest")
    copied.add_argument("to", type=Path, help="a folder that does not exist")
    removed = actions.add_parser("rm", help="remove some; --lost DRIVE: what it has of lost ones")
    removed.add_argument("snapshots", type=Path, nargs="*", help="folders of steps")
    removed.add_argument(
        "--lost",
        type=Path,
        nargs="+",
        default=[],
        metavar="DRIVE",
        help="what these drives keep for snapshots whose folders were removed, or moved elsewhere",
    )
    return parser


def doctor_parser(description: str | None) -> Parser:
    """The options of `strata doctor`."""
    parser = Parser(prog="strata doctor", description=description)
    add = adder(parser)
    # Not KINDS: a folder that is not there is what the command is to tell.
    parser.add_argument(
        "--ssd-path", nargs="+", default=[], metavar="DIR", help="folders on drives, to look at"
    )
    add("--ssd-endurance", ENDURANCE)
    add("--device", DEVICES, default="auto")
    add("--batch", f"sequences in a step of the largest model ({DEFAULT})", default=1)
    add("--sequence", f"tokens of each ({DEFAULT})", default=2048)
    add("--dtype", DEFAULT, default="bfloat16")
    add("--io-engine", DEFAULT, default="auto")
    add("--workers", WORKERS)
    add("--json", "print one JSON object", action="store_true")
    return parser


def _check_ssd(options: argparse.Namespace) -> None:
    """Raises ValueError where an SSD is to be used of which not enough is known, or none is."""
    speeds = (options.ssd_read_speed, options.ssd_write_speed)
    if options.memory["ssd"] and not options.ssd_path and None in speeds:
        raise ValueError(
            "an ssd budget needs --ssd-read-speed and --ssd-write-speed, or --ssd-path to measure"
        )
    kept = getattr(options, "snapshots", 0)
    if kept and not options.memory["ssd"]:
        raise ValueError(f"--snapshots {kept} are kept on an SSD: give ssd= in --memory as well")


def _check_ranks(ranks: int) -> None:
    """Raises ValueError for more than there can be."""
    if ranks > RANKS_MAX:
        raise ValueError(f"ranks on one machine can be 1 to {RANKS_MAX}, and not {ranks}")


def budgets_of(given: Mapping[str, int], page_bytes: int, grads_rest: bool = True) -> Budgets:
    """Budgets by tier, as the planner takes them. `grads_rest`: in pages, until the step ends."""
    return _core.paper_budgets(page_bytes, given["device"], given["host"], given["ssd"], grads_rest)


def wishes_of(activations: str, split: int | None) -> Wishes:
    """What --activations and --split force."""
    return _core.Wishes(
        activation=FORCED[activations],
        slices=split or 0,
        may_split=activations == "auto",
    )


def _budgets(text: str) -> dict[str, int]:
    given: dict[str, str] = {}
    for part in text.split(","):
        tier, equals, size = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not a budget such as device=8GiB")
        if tier.strip() in given:
            raise ValueError(f"{text!r} has two {tier.strip()}= budgets")
        given[tier.strip()] = size
    budgets = {"ssd": 0, **parse_budgets(given)}
    for tier in ("device", "host"):
        if tier not in budgets:
            raise ValueError(f"{text!r} has no {tier}= budget")
    if not budgets["device"]:
        raise ValueError(f"{text!r} leaves nothing for a step to compute in: device= is 0")
    return budgets
