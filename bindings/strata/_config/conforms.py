"""Whether values that came from a file are of the types that dataclasses declare.

    conforms(report, Report, {"Trace": _core.Trace})     # names that only type checkers import

Pure functions.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

INT_MAX = 1 << 63


def conforms(value: Any, hint: Any, names: Mapping[str, Any]) -> bool:
    """Whether a value, and all in it, is of a type. A dictionary in the place of a type says what
    each key of one has. Whole numbers may stand for floats, and fit into 64 bits."""
    if hint is Any:
        return True
    if isinstance(hint, dict):
        fits = isinstance(value, dict) and value.keys() == hint.keys()
        return fits and all(conforms(value[key], each, names) for key, each in hint.items())
    if hint in (None, types.NoneType):
        return value is None
    if hint is bool:
        return type(value) is bool
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return type(value) in numbers and (type(value) is float or abs(value) < INT_MAX)
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType | typing.Union:
            return any(conforms(value, each, names) for each in arguments)
        case origin if origin is list:
            return type(value) is list and all(conforms(v, arguments[0], names) for v in value)
        case origin if origin is dict:
            return type(value) is dict and all(
                conforms(k, arguments[0], names) and conforms(v, arguments[1], names)
                for k, v in value.items()
            )
    if not isinstance(value, hint):
        return False
    if not dataclasses.is_dataclass(hint):
        return True
    hints = typing.get_type_hints(hint, localns=dict(names))
    return all(conforms(getattr(value, name), each, names) for name, each in hints.items())
