"""What a forward may change in plain Python besides the attributes of its modules.

    reach = Reach(roots_of(modules, owners))     # before the forward
    name = reach.iterator                # "" where no iterator can be reached
    name = reach.changed()               # after it: "" where all is as it was
    reach.put_back()

Use from one thread at a time.

Note [Reach]. Attributes are followed through containers, objects and closures, to arrays, tensors
and generators of random numbers. So are the attributes of classes, and the globals that a function
names; those of the functions among them, too, and no further. Left alone are modules, parameters,
and what belongs to Python, torch, NumPy or strata: so the state within a C++ object or a module of
Python is neither seen nor put back.
"""

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from .._runtime.paged_run import is_paged
from .._torch_compat import preserve_version
from .arguments import PLAIN_TYPES

FUNCTION_DEPTH = 2
REACH_MAX = 100_000  # things: what lies beyond is left alone
FOREIGN = frozenset(
    {"builtins", "contextlib", "enum", "functools", "io", "itertools", "logging", "multiprocessing"}
    | {"numpy", "queue", "re", "strata", "threading", "torch", "typing", "weakref"}
)
_NOT_THERE = object()

# Generators of random numbers: how each tells its state, and takes it.
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    numpy.random.RandomState: (
        numpy.random.RandomState.get_state,
        numpy.random.RandomState.set_state,
    ),
    numpy.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
}


@dataclass(slots=True)
class _Held:
    """One thing that can be changed in place. `take` tells what it holds, `give` puts that back."""

    name: str
    thing: Any
    take: Callable[[Any], Any]
    give: Callable[[Any, Any], None]
    before: Any


class Reach:
    """All that can be reached, at one moment. See Note [Reach]."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        """`roots`: what is followed, by the names that the user would know them by."""
        self.iterator = ""
        self._held: list[_Held] = []
        self._seen: dict[int, Any] = {}  # keeps them alive, so that ids stay theirs
        ahead = [(name, value, 0) for name, value in roots]
        while ahead and len(self._seen) < REACH_MAX:
            name, thing, depth = ahead.pop()
            if isinstance(thing, PLAIN_TYPES) or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            ahead += self._follow(name, thing, depth)

    def changed(self) -> str:
        """The name by which something was reached that holds something else now."""
        return next((h.name for h in self._held if not same_values(h.take(h.thing), h.before)), "")

    def put_back(self) -> None:
        """Everything holds again what it held."""
        for held in self._held:
            if not same_values(held.take(held.thing), held.before):
                held.give(held.thing, held.before)

    def _hold(self, name: str, thing: Any, take: Any, give: Any) -> Any:
        before = take(thing)
        self._held.append(_Held(name, thing, take, give, before))
        return before

    def _follow(self, name: str, thing: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
        """Notes what the thing holds. Returns what is reached from it."""
        reached: Iterable[tuple[str, Any]] = ()
        if isinstance(thing, dict):
            found = self._hold(name, thing, lambda d: list(dict.items(d)), _give_items)
            reached = ((name, value) for _, value in found)
        elif isinstance(thing, list | deque | set):
            base: Any = next(t for t in (list, deque, set) if isinstance(thing, t))
            reached = ((name, v) for v in self._hold(name, thing, list, _give_to(base)))
        elif isinstance(thing, tuple | frozenset):
            reached = ((name, value) for value in thing)
        elif isinstance(thing, bytearray):
            self._hold(name, thing, bytes, _give_bytes)
        elif isinstance(thing, numpy.ndarray):
            if thing.flags.writeable:
                self._hold(name, thing, numpy.copy, _give_array)
        elif isinstance(thing, torch.Tensor):
            plain = type(thing) is torch.Tensor and thing.layout is torch.strided
            if plain and not is_paged(thing) and not thing.is_meta:
                self._hold(name, thing, _on_host, _give_tensor)
        elif type(thing) in GENERATORS:
            self._hold(name, thing, *GENERATORS[type(thing)])
        elif isinstance(thing, types.MethodType):
            reached = ((name, thing.__self__), (name, thing.__func__))
        elif isinstance(thing, functools.partial):
            reached = ((name, thing.func), (name, thing.args), (name, thing.keywords))
        elif isinstance(thing, types.CellType):
            reached = ((name, v) for v in self._hold(name, thing, _cell_contents, _give_cell))
        elif isinstance(thing, types.FunctionType):
            if depth < FUNCTION_DEPTH and not _is_foreign(thing):
                yield from ((n, v, depth + 1) for n, v in self._of_function(name, thing))
            return
        elif isinstance(thing, type):
            if not _is_foreign(thing):
                found = self._hold(name, thing, _class_values, _give_class)
                reached = ((f"{thing.__name__}.{n}", value) for n, value in found)
        elif hasattr(type(thing), "__next__"):
            if type(thing).__module__ != "_io":
                self.iterator = self.iterator or name
        elif not isinstance(thing, nn.Module | types.ModuleType) and not _is_foreign(type(thing)):
            own = getattr(thing, "__dict__", None)
            if type(own) is dict:
                reached = [(name, own)]
            slots = self._hold(name, thing, _slot_values, _give_slots)
            reached = [*reached, *((name, value) for _, value in slots), (name, type(thing))]
        yield from ((n, value, depth) for n, value in reached)

    def _of_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        yield from ((name, cell) for cell in function.__closure__ or ())
        yield name, function.__defaults__
        yield name, function.__dict__
        names = tuple(_names(function.__code__))
        space = function.__globals__
        yield from self._hold(name, space, functools.partial(_taken, names), _give_globals)


def roots_of(
    modules: Iterable[nn.Module], owners: Iterable[dict[str, Any]], left_out: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """What the forwards of modules start from: attributes, classes, and the functions that a
    forward names. A generator that is an attribute is left out, for attributes.py knows it."""
    for owner in owners:
        for name, value in owner.items():
            if name not in left_out and type(value) not in GENERATORS:
                yield name, value
    for kind in {kind: None for module in modules for kind in type(module).__mro__}:
        yield kind.__name__, kind
        ahead, functions = ["forward"], dict[str, types.FunctionType]()
        while ahead and not _is_foreign(kind):
            function = vars(kind).get(name := ahead.pop())
            if isinstance(function, types.FunctionType) and name not in functions:
                functions[name] = function
                ahead += _names(function.__code__)
        yield from functions.items()


def same_values(a: Any, b: Any) -> bool:
    """Whether two snapshots hold the very same objects, or equal plain values."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_value, a, b))
    return _same_value(a, b)


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, numpy.ndarray):
        if a.dtype.hasobject:
            return all(x is y for x, y in zip(a.flat, b.flat, strict=True))
        return a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, (*PLAIN_TYPES, bytes)):
        return bool(a == b) or (a != a and b != b)
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def _is_foreign(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in FOREIGN


def _names(code: types.CodeType) -> Iterator[str]:
    """What the code names, and the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _taken(names: tuple[str, ...], space: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, space.get(name, _NOT_THERE)) for name in names]


def _give_globals(space: dict[str, Any], before: list[tuple[str, Any]]) -> None:
    for name, value in before:
        if value is not _NOT_THERE:
            space[name] = value
        elif name in space:
            del space[name]


def _give_items(thing: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    dict.clear(thing)
    for key, value in before:
        dict.__setitem__(thing, key, value)


def _give_to(base: Any) -> Callable[[Any, list[Any]], None]:
    def give(thing: Any, before: list[Any]) -> None:
        base.clear(thing)
        (base.update if base is set else base.extend)(thing, before)

    return give


def _give_bytes(thing: bytearray, before: bytes) -> None:
    thing[:] = before


def _give_array(thing: numpy.ndarray, before: numpy.ndarray) -> None:
    thing[...] = before


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _give_tensor(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad(), preserve_version(tensor):
        tensor.detach().copy_(before)


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _give_cell(cell: types.CellType, before: list[Any]) -> None:
    if before:
        cell.cell_contents = before[0]
    else:
        del cell.cell_contents


def _class_values(kind: type) -> list[tuple[str, Any]]:
    """Attributes of a class that are no part of how it is made."""
    return [
        (name, value)
        for name, value in vars(kind).items()
        if not name.startswith("__") and not hasattr(type(value), "__get__")
    ]


def _give_class(kind: type, before: list[tuple[str, Any]]) -> None:
    for name in dict(_class_values(kind)).keys() - dict(before).keys():
        delattr(kind, name)
    for name, value in before:
        if vars(kind).get(name, _NOT_THERE) is not value:
            setattr(kind, name, value)


def _slots(thing: Any) -> Iterator[Any]:
    for kind in type(thing).__mro__:
        yield from (v for v in vars(kind).values() if isinstance(v, types.MemberDescriptorType))


def _slot_values(thing: Any) -> list[tuple[Any, Any]]:
    found = []
    for slot in _slots(thing):
        try:
            found.append((slot, slot.__get__(thing)))
        except AttributeError:
            found.append((slot, _NOT_THERE))
    return found


def _give_slots(thing: Any, before: list[tuple[Any, Any]]) -> None:
    now = dict(_slot_values(thing))
    for slot, value in before:
        if value is not _NOT_THERE:
            slot.__set__(thing, value)
        elif now[slot] is not _NOT_THERE:
            slot.__delete__(thing)
