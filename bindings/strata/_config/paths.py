"""Paths as users give them: strings, bytes, and whatever has __fspath__(). Needs no torch.

    folder = as_path(path, "weights")

Every function that users give a path comes here first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def is_path(given: object) -> TypeGuard[AnyPath]:
    """Whether it names a file or a folder."""
    return isinstance(given, str | bytes | os.PathLike)


def as_path(given: AnyPath, what: str = "path") -> Path:
    """Raises TypeError, naming `what`, for anything that is no path, and ValueError for a name that
    is no UTF-8, which the core and its files could not tell others."""
    try:
        name = os.fsdecode(given)
        name.encode()
    except TypeError as error:
        raise TypeError(
            f"{what} must be a path (a string, bytes or os.PathLike), not {given!r:.60}"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} {name!r} is not UTF-8: rename it, or make a link to it with such a name"
        ) from error
    return Path(name)
