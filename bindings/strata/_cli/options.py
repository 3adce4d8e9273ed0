"""The command line's options: what several commands take is said once, and how it is parsed.

    parser = Parser(prog="strata plan", description="...")
    add = adder(parser.add_argument_group("the step"))
    add("--batch", "sequences (default: 1)", default=1)

Needs no torch.
"""

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from .._config.choices import (
    ACTIVATIONS,
    DTYPES,
    IO_ENGINES,
    STATE_DTYPES,
    as_written,
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
from .._config.sizes import parse_size, parse_speed
from .._config.update_modes import parse_update

# What options take, and how help calls that; all others take any text.
_KINDS: tuple[tuple[Callable[[str], Any], str, tuple[str, ...]], ...] = (
    (positive, "N", ("--steps", "--batch", "--sequence", "--accumulation", "--split")),
    (positive, "N", ("--vocabulary", "--eval-windows")),
    (count, "N", ("--warmup", "--seed", "--eval-every", "--save-every", "--generate")),
    (workers, "N", ("--workers",)),
    (number, "RATE", ("--lr", "--weight-decay")),
    (number, "NORM", ("--max-grad-norm",)),
    (fraction, "PART", ("--held-out",)),
    (parse_size, "SIZE", ("--device-memory", "--host-memory", "--ssd-memory")),
    (parse_size, "SIZE", ("--data-limit", "--ssd-endurance")),
    (page_size, "SIZE", ("--page-size",)),
    (parse_speed, "SPEED", ("--upload-speed", "--download-speed", "--device-bandwidth")),
    (parse_speed, "SPEED", ("--ssd-read-speed", "--ssd-write-speed")),
    (parse_count, "N", ("--update-speed", "--flops")),
    (parse_factor, "X", ("--tokens-scale", "--compute-speed")),
    (parse_device, "NAME", ("--device",)),
    (parse_update, "MODE", ("--update",)),
    (folder, "DIR", ("--ssd-path",)),
)
KINDS = {name: (parse, metavar) for parse, metavar, names in _KINDS for name in names}
CHOICES = {
    "--activations": ACTIVATIONS,
    "--dtype": DTYPES,
    "--io-engine": IO_ENGINES,
    "--state-dtype": STATE_DTYPES,
}
AS_WRITTEN = ("SIZE", "NAME", "MODE")  # what finetune remembers as people wrote it
SEVERAL = ("--ssd-path", "--data")
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

    def error(self, message: str) -> NoReturn:
        """Called by argparse for whatever cannot be parsed."""
        options = [o for action in self._actions for o in action.option_strings]
        unknown = [word for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and unknown:
            word = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(word, options, n=1, cutoff=0.0)
            message = f"unknown option {word!r}: did you mean {close[0]!r}?"
        super().error(message)


def adder(group: Any, written: bool = False) -> Callable[..., None]:
    """What adds options to a parser or a group of one: add(name, help, **more), as argparse takes
    more. `written`: sizes, devices and modes stay as people write them."""

    def add(name: str, help: str, **more: Any) -> None:
        if name in CHOICES:
            more = {"choices": CHOICES[name], **more}
        elif name in KINDS:
            parse, metavar = KINDS[name]
            parse = as_written(parse) if written and metavar in AS_WRITTEN else parse
            more = {"type": worded(parse), "metavar": metavar, **more}
        if name in SEVERAL:
            more["nargs"] = "+"
        group.add_argument(name, help=help, **more)

    return add
