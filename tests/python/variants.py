"""Variants of a test: those that only `./dev check` runs."""

from typing import Any

import pytest


def thorough(*case: Any) -> Any:
    """A case that only `./dev check` runs."""
    return pytest.param(*case, marks=pytest.mark.thorough)


def quick_first(cases: list[Any], count: int) -> list[Any]:
    """Parameters of a test, of which all but the first ones are thorough."""
    quick = [pytest.param(*case) for case in cases[:count]]
    return quick + [thorough(*case) for case in cases[count:]]
