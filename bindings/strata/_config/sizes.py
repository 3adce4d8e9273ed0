"""Sizes in bytes, as people write them: "8GiB", "500 MB", "1.5 TiB", "4096B"; an int is bytes.
Speeds: "12GB/s". A number in words needs its unit: of 96, nobody knows whether bytes were meant.
"""

import re
from collections.abc import Mapping

from .._errors import check_choice, nearest

UNITS = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
SIZE_MAX = 1 << 60  # sums of sizes still fit into 64 bits
BARE_BYTES_MIN = 1 << 16  # a number without a unit that is no smaller must be bytes
TIERS = ("device", "host", "ssd")

YEAR_SECONDS = 365.25 * 86400
# Units of time, the seconds that each has, and the number of them from which on the next one is
# taken.
DURATIONS = (("s", 1, 120), ("minute", 60, 120), ("hour", 3600, 48), ("day", 86400, 730))

Size = int | str

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(size: Size) -> int:
    """Bytes. Raises ValueError, with the nearest valid form, for what is not a size."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"a size is an int or a string such as '8GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size cannot be negative: {size}")
        return _bounded(size)
    match = _PATTERN.fullmatch(size)
    if match is None:
        raise ValueError(f"{size!r} is not a size; write a number and a unit, such as '8GiB'")
    number, unit = match.groups()
    factors = {name.lower(): factor for name, factor in UNITS.items()}
    if not unit:
        likely = "B" if number.isdigit() and int(number) >= BARE_BYTES_MIN else "GiB"
        raise ValueError(f"{size!r} has no unit: write '{number}{likely}'")
    if unit.lower() not in factors:
        raise ValueError(f"unknown unit {unit!r} in {size!r}: {nearest(unit, UNITS)}")
    whole = factors[unit.lower()]
    return _bounded(int(number) * whole if number.isdigit() else round(float(number) * whole))


def parse_some(size: Size) -> int:
    """As parse_size(). Raises ValueError for none at all, too."""
    found = parse_size(size)
    if not found:
        raise ValueError(f"{size!r} is nothing: leave it out, or write more")
    return found


def parse_speed(text: str) -> int:
    """Bytes per second. Raises ValueError, with the nearest valid form, for what is no speed."""
    amount, slash, second = (part.strip() for part in text.partition("/"))
    if (match := _PATTERN.fullmatch(amount)) and not float(match[1]):
        raise ValueError(f"{text!r} is no speed: nothing would ever arrive")
    if _PATTERN.fullmatch(amount) and (not amount[-1].isalpha() or not slash):
        unit = "" if amount[-1].isalpha() else "GB"
        raise ValueError(f"{text!r} is not a speed: write '{amount}{unit}/s'")
    if second != "s":
        raise ValueError(f"{text!r} is not a speed; write a size a second, such as '6GB/s'")
    return parse_size(amount)


def _bounded(size: int) -> int:
    if size > SIZE_MAX:
        raise ValueError(f"a size of {size} bytes is more than any machine has")
    return size


def parse_budgets(memory: Mapping[str, Size] | None) -> dict[str, int]:
    """The budgets that were given, in bytes, by tier. Raises ValueError for an unknown tier."""
    budgets = {}
    for tier, size in (memory or {}).items():
        check_choice("tier", tier, TIERS)
        budgets[tier] = parse_size(size)
    return budgets


def format_size(size: float) -> str:
    """For people: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def write_size(size: int) -> str:
    """As options take it, and no less: 13GiB, 700MiB."""
    unit, name = (1 << 30, "GiB") if size >= 10 << 30 else (1 << 20, "MiB")
    return f"{-(-size // unit)}{name}"


def duration_unit(seconds: float) -> tuple[str, float]:
    """What a duration like this one is told in, in the singular, and the seconds that it has."""
    for name, size, most in DURATIONS:
        if seconds < size * most:
            return name, size
    return "year", YEAR_SECONDS


def format_duration(seconds: float) -> str:
    """For people: 3.2 s, 25 minutes, 90 years."""
    name, size = duration_unit(seconds)
    if name == "year":
        return f"{seconds / size:,.0f} years"
    number = f"{seconds / size:.3g}"
    return f"{number} s" if name == "s" else f"{number} {name}{'s' * (number != '1')}"


def format_count(count: int, what: str) -> str:
    """For people: 1 unit, 12 units, 1,000 steps. `what`: in the singular."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def format_number(value: float) -> str:
    """For people: two digits at least, and all that are ahead of the point: 0.037, 4.2, 5,125."""
    return f"{value:.2g}" if value < 9.95 else f"{value:,.0f}"


def format_rate(per_second: float, what: str) -> str:
    """For people: 5,125 tokens a second; where that is less than one, those of an hour or a day."""
    for unit, seconds in (("a second", 1), ("an hour", 3600)):
        if per_second * seconds >= 1:
            return f"{format_number(per_second * seconds)} {what} {unit}"
    return f"{format_number(per_second * 86400)} {what} a day"
