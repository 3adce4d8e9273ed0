"""What options may be set to, for the command line and strata.wrap() alike, and how text is parsed.
Needs no torch, so that `strata --help` and wrong calls are answered at once.

    parse_device("cuda")                      # "cuda:0", as the core names it
    check_page_size(sizes.parse_size("4MiB"))
    in_words("recompute_host")                # "recompute from host", where its inputs are
    parser.add_argument("--batch", type=worded(positive))
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .._errors import check_choice
from .sizes import format_size, parse_size

if TYPE_CHECKING:
    from .._core import ActivationName, StoredName

# What activations= forces, by the planner's names.
FORCED: dict[str, ActivationName | None] = {
    "auto": None,
    "keep": "keep",
    "swap": "swap_host",
    "recompute": "recompute",
}
ACTIVATIONS = tuple(FORCED)
IO_ENGINES = ("auto", "io_uring", "libaio", "threads", "memory")
DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "8bit")  # as the command line writes them
# How what is frozen may rest: as it is, and forms of codes.
AS_IS = "as-is"
INIT = "init"  # of weights=: the modules' own initialisers; a folder of that name is ./init
FORMS: tuple[StoredName, ...] = ("int8", "nf4", "nf4-double", "nf4-torchao")
# What becomes of saved tensors, by the planner's names: see offload/planner/trace.hpp.
RECOMPUTES = frozenset(("recompute", "recompute_host", "recompute_ssd"))
# Some saved tensors leave the device: all of them, or of a recomputed unit its inputs.
SWAPS = frozenset(("swap_host", "swap_ssd", "recompute_host", "recompute_ssd"))
TO_SSD = frozenset(("swap_ssd", "recompute_ssd"))
HOST = "host"
DEVICES = ("auto", HOST, "cpu", "cuda")
PAGE_BYTES_MIN, PAGE_BYTES_MAX = 64 << 10, 64 << 20
WORKERS_LIMIT = 1024  # of the core
RANKS_MAX = 256  # of the core, on one machine
SNAPSHOTS_MAX = 1_000_000

# The lanes that bytes and updates take, and where the planner's Costs have the speed of each.
SPEED_OF = {
    "upload": "upload_bytes_s",
    "download": "download_bytes_s",
    "read": "read_bytes_s",
    "write": "write_bytes_s",
    "update": "update_elements_s",
}

# Fresh models that have a name: hidden size, layers, heads, intermediate size.
MODEL_SIZES = {
    "llama-10m": (256, 8, 4, 768),
    "llama-25m": (384, 10, 6, 1024),
    "llama-110m": (768, 14, 12, 2048),
    "llama-350m": (1024, 24, 16, 3072),
    "llama-1b": (2048, 20, 16, 5632),
}


def parse_device(text: str) -> str:
    """The core's name of the device that is meant; "auto" as it is. Raises ValueError."""
    kind, _, number = text.partition(":")
    if kind == "cuda" and number.isdecimal():
        return f"cuda:{int(number)}"
    check_choice("device", text, DEVICES)
    return {"cpu": HOST, "cuda": "cuda:0"}.get(text, text)


def check_base(frozen: str, lora: str | None) -> None:
    """Raises ValueError where a stored form is asked for and everything trains."""
    if frozen != AS_IS and not lora:
        raise ValueError(
            f"--frozen {frozen} stores what is not trained, and without --lora all is: give "
            "--lora r=8 as well"
        )


def check_split(slices: int | None, activations: str | None) -> None:
    """Raises ValueError for what is no number of slices, and for what they cannot go with."""
    if slices is None:
        return
    if slices < 2:
        raise ValueError(f"split must be at least 2, or left out, not {slices}")
    if activations not in ("auto", "recompute"):
        raise ValueError(
            "split computes slices of the batch one after the other and recomputes them, which "
            f"activations={activations!r} rules out: take activations='auto'"
        )


def check_snapshots(kept: int, ssd_paths: Sequence[str]) -> None:
    """Raises ValueError for what is no number of snapshots, and without a place for them."""
    if isinstance(kept, bool) or not 0 <= kept <= SNAPSHOTS_MAX:
        raise ValueError(f"snapshots must be from 0 to {SNAPSHOTS_MAX}, not {kept!r}")
    if kept and not ssd_paths:
        raise ValueError(f"snapshots={kept} are kept on the SSD: give ssd_path=, a folder there")


def check_workers(workers: int) -> None:
    """Raises ValueError for what is no number of threads that the core would start."""
    if not 1 <= workers <= WORKERS_LIMIT:
        raise ValueError(f"workers must be from 1 to {WORKERS_LIMIT}, not {workers}")


def check_page_size(size: int) -> None:
    """Raises ValueError for what no page can be."""
    if not PAGE_BYTES_MIN <= size <= PAGE_BYTES_MAX or size & (size - 1):
        raise ValueError(
            f"page_size must be a power of two from {format_size(PAGE_BYTES_MIN)} to "
            f"{format_size(PAGE_BYTES_MAX)}, not {format_size(size)}"
        )


def leaves(activation: str, is_input: bool) -> bool:
    """Whether a saved tensor leaves the device. `is_input`: it was there before the forward."""
    return activation in SWAPS and (is_input or activation not in RECOMPUTES)


def in_words(activation: str) -> str:
    """For people."""
    return activation.replace("_", " from " if activation in RECOMPUTES else " to ")


COUNT_MAX = (1 << 63) - 1  # PyTorch takes no larger sizes, seeds and numbers of steps
DIGITS_MAX = 40  # of a number that is read
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

T = TypeVar("T")


def folder(text: str) -> str:
    """A folder that is there. Raises ValueError."""
    if not Path(text).is_dir():
        raise ValueError(f"{text} is not a folder")
    return text


def parse_count(text: str) -> float:
    """A number with k, M, G or T behind it, or an exponent: "2.5G", "989T", "4e14". Raises
    ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(e\d+)?)\s*([kKmMgGtT]?)\s*", text)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a number such as 500M or 2G")
    if not match[2] and not match[3]:
        raise ValueError(f"{text!r} has no unit: write '{match[1]}G', or another of k, M, G and T")
    number = float(match[1]) * COUNTS[match[3].lower()]
    if number == math.inf:
        raise ValueError(f"{match[1]}{match[3]} is more than can be counted")
    return number


def parse_factor(text: str) -> float:
    """ "2x" or "0.5": a positive number. Raises ValueError."""
    factor = _float(text.strip().removesuffix("x"))
    if not 0 < factor < 1e6:
        raise ValueError(f"{text!r} is not a factor such as 2x or 0.5")
    return factor


def positive(text: str) -> int:
    """A whole number from 1 on. Raises ValueError."""
    if not text.isdecimal() or not text.strip("0"):
        raise ValueError(f"{text!r} is not a positive whole number")
    return _bounded(text)


def workers(text: str) -> int:
    """How many threads update parameters. Raises ValueError."""
    threads = positive(text)
    check_workers(threads)
    return threads


def page_size(text: str) -> int:
    """A power of two that pages can have. Raises ValueError."""
    size = parse_size(text)
    check_page_size(size)
    return size


def worded(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse, which by itself hides what a ValueError says."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def as_written(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The text itself, where it can be parsed."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return checked


def count(text: str) -> int:
    """A whole number from 0 on. Raises ValueError."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number of at least 0")
    return _bounded(text)


def fraction(text: str) -> float:
    """A number between 0 and 1. Raises ValueError."""
    value = number(text)
    if not 0 < value < 1:
        raise ValueError(f"{text!r} is not between 0 and 1")
    return value


def number(text: str) -> float:
    """A number from 0 on. Raises ValueError."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is not a number of at least 0")
    return value


def _float(text: str) -> float:
    """NaN where it is no number: every comparison with that is false."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bounded(text: str) -> int:
    # int() refuses thousands of digits, in words of its own.
    if len(text) > DIGITS_MAX or int(text) > COUNT_MAX:
        raise ValueError(f"{text[:DIGITS_MAX]} is more than can be counted")
    return int(text)
