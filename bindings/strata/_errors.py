"""What strata raises, and how it names what the user probably meant."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from ._core import StrataError

__all__ = [
    "EXTRAS",
    "StrataError",
    "check_choice",
    "import_failure",
    "is_for_snapshots",
    "keywords_of",
    "listed",
    "names_nearest",
    "nearest",
    "nearest_option",
    "with_more",
]

# What parts of the package import beside torch, numpy and safetensors, by the extra of
# pyproject.toml that brings it; the smallest first.
EXTRAS = {
    "plots": ("matplotlib",),
    "finetune": (
        *("accelerate", "datasets", "matplotlib", "peft", "tokenizers", "tqdm"),
        *("transformers", "yaml"),
    ),
}

NEAR = 0.65  # of 1: the likeness of options; that of --tokens and --workers is less

P = ParamSpec("P")
R = TypeVar("R")


def nearest(word: str, valid: Iterable[str]) -> str:
    """The end of an error message: the closest of `valid`, or all of them."""
    choices = list(valid)
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    return "valid: " + ", ".join(repr(choice) for choice in choices)


def nearest_option(word: str, options: Iterable[str], command: str) -> str:
    """What is said of an option that there is not: the nearest one, where one is near."""
    names = {option.lstrip("-"): option for option in options}
    close = difflib.get_close_matches(word.lstrip("-").lower(), names, n=1, cutoff=NEAR)
    what = f"did you mean {names[close[0]]!r}?" if close else f"{command} --help lists all"
    return f"unknown option {word!r}: {what}"


def import_failure(error: ImportError) -> str:
    """What an import that failed says to a user: how to install what is missing, where it is of an
    extra."""
    missing = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and missing in packages:
            return f"{missing} is not installed, and this needs it: pip install 'strata[{extra}]'"
    return " ".join(str(error).split())


def is_for_snapshots(error: StrataError) -> bool:
    """Whether the SSD had no room for snapshots."""
    return error.snapshot_bytes > 0


def with_more(error: StrataError, more: str) -> StrataError:
    """The same error, with all that it knows and more words behind its own."""
    told = StrataError(f"{error}{more}")
    vars(told).update(vars(error))
    return told


def listed(items: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """For an error message: the first few, and how many more there are."""
    more = len(items) - most
    return between.join(items[:most]) + (f" and {more} more" if more > 0 else "")


def check_choice(what: str, value: str, valid: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `valid`."""
    choices = list(valid)
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}: {nearest(str(value), choices)}")


def names_nearest(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: for an unknown keyword the TypeError of Python names the nearest that there is.
    For type checkers the function stays as it is."""
    return keywords_of(function)(function)


def keywords_of(like: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator for a function that takes what `like` takes; as names_nearest()."""
    parameters = inspect.signature(like).parameters.values()
    known = {p.name: p.kind for p in parameters}
    valid = [name for name, kind in known.items() if kind is inspect.Parameter.KEYWORD_ONLY]

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for word in keywords.keys() - known.keys():
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {word!r}: "
                    + nearest(word, valid)
                )
            return function(*args, **keywords)

        return checked

    return decorate
