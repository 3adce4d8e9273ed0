"""What a value on the command line may be, as types of argparse. Needs no torch.

parse = worded(positive)                  # an argument's `type`
parse("abc")                              # 'abc' is not a positive whole number
size = worded(as_written(parse_size))     # "8GiB", which is a size
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .choices import check_page_size, check_workers
from .sizes import parse_size

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
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        factor = 0.0
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
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is not a number of at least 0")
    return value


def _bounded(text: str) -> int:
    # int() refuses thousands of digits, in words of its own.
    if len(text) > DIGITS_MAX or int(text) > COUNT_MAX:
        raise ValueError(f"{text[:DIGITS_MAX]} is more than can be counted")
    return int(text)
