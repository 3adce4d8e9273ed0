"""Sizes in bytes, as people write them: 1048576, "8GiB", "500 MB", "1.5 TiB"."""

import re
from collections.abc import Mapping

from .errors import check_choice, nearest

UNITS = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
SIZE_MAX = 1 << 60  # sums of sizes still fit into 64 bits
TIERS = ("device", "host", "ssd")

Size = int | str

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(size: Size) -> int:
    """Bytes. Raises ValueError, naming the nearest unit, for what is not a size."""
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
    if unit and unit.lower() not in factors:
        raise ValueError(f"unknown unit {unit!r} in {size!r}: {nearest(unit, UNITS)}")
    whole = factors[unit.lower()] if unit else 1
    return _bounded(int(number) * whole if number.isdigit() else round(float(number) * whole))


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
