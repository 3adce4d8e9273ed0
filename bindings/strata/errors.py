"""What strata raises, and how it names what the user probably meant."""

import difflib
from collections.abc import Iterable

from ._core import StrataError

__all__ = ["StrataError", "check_choice", "check_keywords", "nearest"]


def nearest(word: str, valid: Iterable[str]) -> str:
    """The end of an error message: the closest of `valid`, or all of them."""
    choices = list(valid)
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    return "valid: " + ", ".join(repr(choice) for choice in choices)


def check_choice(what: str, value: str, valid: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `valid`."""
    choices = list(valid)
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}: {nearest(str(value), choices)}")


def check_keywords(function: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raises TypeError, as Python does for an unknown keyword, and names the nearest valid one."""
    choices = list(valid)
    for word in given:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {word!r}: {nearest(word, choices)}"
        )
