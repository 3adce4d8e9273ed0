"""What our own files hold: types say it, one reader holds values against them, and one sentence
says what is wrong.

    class Record(TypedDict):                # stays a dictionary, whatever other keys it has
        kind: str
        bytes: Count

    @dataclass(frozen=True)
    class Owner:                            # is made of a dictionary that has no other keys
        folder: str
        pending: bool = False

    OWNER = Form(Owner)
    owner = OWNER.read(parsed(text))        # FormError: 'folder' is 3, and should be a text

Types: bool, int, float, str, None, Any, Literal, list[T], dict[str, T], tuple[T, U] (a list of
two), T | U, dataclasses, TypedDicts, structs of the planner; and Annotated with Between or Matches.
A dictionary of types is a TypedDict without a name. A whole number may stand for a float. Values
are those of JSON. Pure functions.
"""

from __future__ import annotations

import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

T = TypeVar("T")
INT_MAX = (1 << 63) - 1


class FormError(ValueError):
    """A value is not what its form says; the message says where, and what it should be."""


@dataclass(frozen=True)
class Between:
    """Both ends included: a number, or how many a list has."""

    low: float
    high: float = INT_MAX


@dataclass(frozen=True)
class Matches:
    """All of a text matches the pattern. `words`: what it should be."""

    pattern: str
    words: str


Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Steps = Annotated[int, Between(0, (1 << 53) - 1)]
Digest = Annotated[str, Matches("[0-9a-f]{16}", "16 hexadecimal digits")]


class Form(Generic[T]):
    """What values have to be. It looks up all types when it is made."""

    def __init__(
        self, hint: type[T] | dict[str, Any], names: Mapping[str, Any] | None = None
    ) -> None:
        """`names`: types in annotations that only type checkers import."""
        self._kind = _kind(hint, names or {})

    def read(self, value: Any) -> T:
        """The value; what dataclasses and structs describe is made. Raises FormError."""
        try:
            result: T = self._kind.read(value)
        except _MisfitError as misfit:
            raise FormError(misfit.sentence()) from misfit.__cause__
        return result


def parsed(raw: bytes | str) -> Any:
    """A JSON value. Raises FormError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormError(f"it is cut off, or no JSON ({error!s:.100})") from error


class _MisfitError(Exception):
    """On its way up to where the whole value is known."""

    def __init__(self, problem: str, *place: str | int) -> None:
        super().__init__(problem)
        self.place = list(place)  # keys, the innermost first

    def sentence(self) -> str:
        steps = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.place[::-1]]
        if not self.place or isinstance(self.place[0], int):
            return f"{''.join(steps).strip('.') or 'it'} {self}"
        where = "".join(steps[:-1]).strip(".")
        return f"{where}: {self.place[0]!r} {self}" if where else f"{self.place[0]!r} {self}"


@dataclass(frozen=True)
class _Kind:
    words: str  # what a value should be
    read: Callable[[Any], Any]  # raises _MisfitError


def _misfit(value: Any, words: str) -> _MisfitError:
    return _MisfitError(f"is {value!r:.60}, and should be {words}")


def _kind(hint: Any, names: Mapping[str, Any]) -> _Kind:
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case origin if origin is Annotated:
            return _ruled(_kind(arguments[0], names), arguments[1])
        case origin if origin is Literal:
            return _plain(f"one of {arguments}", lambda value: value in arguments)
        case types.UnionType | typing.Union:
            return _either([_kind(each, names) for each in arguments])
        case origin if origin is list:
            kinds = itertools.repeat(_kind(arguments[0], names))
            return _Kind("a list", lambda value: _items(value, "a list", kinds))
        case origin if origin is tuple:
            row, words = [_kind(each, names) for each in arguments], f"a list of {len(arguments)}"
            exact = _plain(words, lambda value: type(value) is list and len(value) == len(row))
            return _Kind(words, lambda value: _items(exact.read(value), words, row))
        case origin if origin is dict:
            inner = _kind(arguments[1], names)
            each = dict.fromkeys
            return _Kind("an object", lambda v: _entries(v, each(OBJECT.read(v), inner)))
    if isinstance(hint, dict):
        return _keys(hint, names)
    if hint in PLAIN:
        return PLAIN[hint]
    if typing.is_typeddict(hint):
        return _keys(typing.get_type_hints(hint, None, dict(names), include_extras=True), names)
    return _made(hint, names) if is_dataclass(hint) else _struct(hint)


def _plain(words: str, fits: Callable[[Any], bool]) -> _Kind:
    def read(value: Any) -> Any:
        if not fits(value):
            raise _misfit(value, words)
        return value

    return _Kind(words, read)


def _is_int(value: Any) -> bool:
    return type(value) is int and -1 << 63 <= value < 1 << 64  # as the core has them


PLAIN: dict[Any, _Kind] = {
    Any: _plain("anything", lambda value: True),
    types.NoneType: _plain("null", lambda value: value is None),
    bool: _plain("true or false", lambda value: type(value) is bool),
    int: _plain("a whole number", _is_int),
    float: _plain("a number", lambda value: type(value) is float or _is_int(value)),
    str: _plain("a text", lambda value: type(value) is str),
}
OBJECT = _plain("an object", lambda value: type(value) is dict)


def _ruled(inner: _Kind, rule: Between | Matches) -> _Kind:
    if isinstance(rule, Matches):
        pattern = re.compile(rule.pattern)
        ruled = _plain(rule.words, lambda value: pattern.fullmatch(value) is not None)
    else:
        low, high = rule.low, rule.high
        amount = f"{low} or more" if high == INT_MAX else f"{low} to {high}"
        words = f"{inner.words}, {amount}"
        if inner is PLAIN[int]:  # there are many of these
            return _plain(words, lambda value: type(value) is int and low <= value <= high)
        if inner.words == "a list":
            ruled = _plain(f"a list of {amount}", lambda value: low <= len(value) <= high)
        else:
            ruled = _plain(words, lambda value: low <= value <= high)  # NaN is not
    return _Kind(ruled.words, lambda value: ruled.read(inner.read(value)))


def _either(kinds: list[_Kind]) -> _Kind:
    null = PLAIN[types.NoneType]
    others = [kind for kind in kinds if kind is not null]
    words = " or ".join(kind.words for kind in kinds)

    def read(value: Any) -> Any:
        if value is None and null in kinds:
            return None
        if len(others) == 1:
            return others[0].read(value)  # which says more of what is wrong
        for kind in others:
            try:
                return kind.read(value)
            except _MisfitError:
                continue
        raise _misfit(value, words)

    return _Kind(words, read)


def _items(value: Any, words: str, kinds: Iterable[_Kind]) -> list[Any]:
    if type(value) is not list:
        raise _misfit(value, words)
    found: list[Any] = []
    try:
        for each, kind in zip(value, kinds, strict=False):
            found.append(kind.read(each))
    except _MisfitError as misfit:
        misfit.place.append(len(found))
        raise
    return found


def _entries(
    value: Any, kinds: Mapping[str, _Kind], optional: Iterable[str] = (), more: bool = False
) -> dict[str, Any]:
    """What an object has of these keys; and all else, if it may have `more`."""
    found: dict[str, Any] = dict(OBJECT.read(value)) if more else {}
    for key, kind in kinds.items():
        if key not in OBJECT.read(value) and key not in optional:
            raise _MisfitError("is missing", key)
        if key in value:
            try:
                found[key] = kind.read(value[key])
            except _MisfitError as misfit:
                misfit.place.append(key)
                raise
    return found


def _keys(hints: dict[str, Any], names: Mapping[str, Any]) -> _Kind:
    """The form of a TypedDict, whose values may have more keys."""
    optional = {key for key, each in hints.items() if typing.get_origin(each) is NotRequired}
    bare = {k: typing.get_args(h)[0] if k in optional else h for k, h in hints.items()}
    kinds = {key: _kind(each, names) for key, each in bare.items()}
    return _Kind("an object", lambda value: _entries(value, kinds, optional, more=True))


def _made(hint: Any, names: Mapping[str, Any]) -> _Kind:
    """The form of a dataclass, which has no place for more keys."""
    hints = typing.get_type_hints(hint, localns=dict(names), include_extras=True)
    kinds = {each.name: _kind(hints[each.name], names) for each in fields(hint)}
    given = (each for each in fields(hint) if each.default is MISSING)
    needed = {each.name for each in given if each.default_factory is MISSING}

    def read(value: Any) -> Any:
        found = _entries(value, kinds, kinds.keys() - needed)
        for key in value.keys() - found.keys():
            raise _MisfitError("is unknown", key)
        return hint(**found)

    return _Kind("an object", read)


def _struct(hint: Any) -> _Kind:
    """One of the planner's, which holds its fields against their types itself."""

    def read(value: Any) -> Any:
        try:
            return hint(**OBJECT.read(value))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _MisfitError(f"is no {hint.__name__}: {error!s:.200}") from error

    return _Kind("an object", read)
