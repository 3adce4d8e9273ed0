"""What a forward may change in plain Python besides the attributes of its modules.

    reach = Reach([("forward", forward), ("argument", argument)], owners)     # before the forward
    name = reach.iterator                # "" where no iterator can be reached
    name = reach.changed()               # after it: "" where all is as it was
    reach.put_back()

Use from one thread at a time.

Note [Reach]. The forward, its arguments and the variables of the context are followed through
attributes, containers, objects and closures, to arrays, tensors and generators of random numbers.
So are the attributes of classes, and the globals that a function names; those of the functions
among them, too, and no further. A module of somebody else (a parent, a helper in a list) is
followed like the forward's own, with its buffers and the modules below it. Left alone are
parameters, and what belongs to Python, torch, NumPy or strata: so the state within a C++ object or
a module of Python is neither seen nor put back. Nor is what a ContextVar is set to: trial.py runs
forwards in a copy of the context.

Note [Caches of functions]. What functools.lru_cache keeps can be emptied, but not copied. A cache
that was empty is emptied when the trial is over, and not between its runs: the second one finds in
it what a second run in the backward would find. One that held something keeps what a trial adds.
"""

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
# torch's own attributes of a module: its parameters, buffers, modules and hooks.
TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}
NOT_THERE = object()
CACHE = type(functools.lru_cache(lambda: None))

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

    def is_changed(self) -> bool:
        return not same(self.take(self.thing), self.before, strict=True)


class Reach:
    """All that can be reached, at one moment. See Note [Reach]."""

    def __init__(self, roots: Iterable[tuple[str, Any]], owners: Iterable[dict[str, Any]]) -> None:
        """`roots`: what is followed, by the names that the user would know them by; `owners`: the
        attributes that attributes.py holds, with the generators among them."""
        self.iterator = ""
        self.modules: list[nn.Module] = []  # of somebody else
        self._owners = {id(owner) for owner in owners}
        self._held: list[_Held] = []
        self._empty: list[Any] = []  # caches of functions, which cannot be copied
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
        return next((h.name for h in self._held if h.is_changed()), "")

    def put_back(self) -> None:
        """Everything holds again what it held."""
        for held in self._held:
            if held.is_changed():
                held.give(held.thing, held.before)

    def empty_caches(self) -> None:
        """Those are empty again that were."""
        for cache in self._empty:
            if cache.cache_info().currsize:
                cache.cache_clear()

    def _hold(self, name: str, thing: Any, take: Any, give: Any) -> Any:
        before = take(thing)
        self._held.append(_Held(name, thing, take, give, before))
        return before

    def _follow(self, name: str, thing: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
        """Notes what the thing holds. Returns what is reached from it."""
        reached: Iterable[tuple[str, Any]] = ()
        if id(thing) in self._owners:
            reached = self._of_owner(thing)
        elif isinstance(thing, dict):
            found = self._hold(name, thing, lambda d: tuple(dict.items(d)), _give_items)
            reached = ((name, value) for _, value in found)
        elif isinstance(thing, list | deque | set):
            base: Any = next(t for t in (list, deque, set) if isinstance(thing, t))
            reached = ((name, v) for v in self._hold(name, thing, tuple, _give_to(base)))
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
        elif isinstance(thing, CACHE):
            if not _is_foreign(thing) and not thing.cache_info().currsize:
                self._empty.append(thing)
            reached = [(name, thing.__wrapped__)]
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
        elif isinstance(thing, nn.Module):
            reached = self._of_module(name, thing)
        elif not isinstance(thing, types.ModuleType) and not _is_foreign(type(thing)):
            slots = self._hold(name, thing, _slot_values, _give_slots)
            reached = [*((name, value) for _, value in slots), (name, type(thing))]
        yield from ((n, value, depth) for n, value in reached)
        own = getattr(thing, "__dict__", None)
        left_alone = isinstance(thing, nn.Module | types.ModuleType) or _is_foreign(type(thing))
        if type(own) is dict and not left_alone:
            yield name, own, depth

    def _of_owner(self, owner: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in owner.items():
            if name not in TORCHS_OWN and type(value) not in GENERATORS:
                yield name, value

    def _of_module(self, name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        own = vars(module)
        if id(own) in self._owners:
            yield name, own
        else:
            self.modules.append(module)
            found = self._hold(name, own, _module_values, _give_module)
            yield from ((f"{name}.{n}", value) for n, value in found)
            yield name, own.get("_buffers")
            yield from ((f"{name}.{n}", m) for n, m in own.get("_modules", {}).items())
        for kind in type(module).__mro__:
            yield kind.__name__, kind
            yield from _functions(kind).items()

    def _of_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        yield from ((name, cell) for cell in function.__closure__ or ())
        yield name, function.__defaults__
        yield name, function.__dict__
        names = tuple(_names(function.__code__))
        space = function.__globals__
        yield from self._hold(name, space, functools.partial(_taken, names), _give_globals)


def _functions(kind: type) -> dict[str, Any]:
    """The forward of a class of modules, and the functions of that class that it names."""
    ahead, functions = ["forward"], dict[str, Any]()
    while ahead and not _is_foreign(kind):
        function = vars(kind).get(name := ahead.pop())
        plain = function.__wrapped__ if isinstance(function, CACHE) else function
        if isinstance(plain, types.FunctionType) and name not in functions:
            functions[name] = function
            ahead += _names(plain.__code__)
    return functions


def same(a: Any, b: Any, strict: bool = False) -> bool:
    """Whether two values are the same, bit for bit. Two objects of one type are, and so are two
    lists of the same; if `strict`, only the very same ones are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and same_tensors(a.detach(), b.detach())
    if isinstance(a, numpy.ndarray):
        if a.dtype.hasobject:
            a, b = list(a.flat), list(b.flat)
            return len(a) == len(b) and all(same(x, y, strict) for x, y in zip(a, b, strict=True))
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple) or (isinstance(a, list | deque) and not strict):
        return len(a) == len(b) and all(same(x, y, strict) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k], strict) for k, v in a.items())
    if isinstance(a, PLAIN_TYPES) or (isinstance(a, set | frozenset) and not strict):
        return bool(a == b) or (a != a and b != b)
    return not strict


def same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, except for the kind of a NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _is_foreign(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in FOREIGN


def _names(code: types.CodeType) -> Iterator[str]:
    """What the code names, and the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _taken(names: tuple[str, ...], space: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, space.get(name, NOT_THERE)) for name in names)


def _give_globals(space: dict[str, Any], before: Iterable[tuple[str, Any]]) -> None:
    for name, value in before:
        if value is not NOT_THERE:
            space[name] = value
        elif name in space:
            del space[name]


def _module_values(own: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in own.items() if name not in TORCHS_OWN)


def _give_module(own: dict[str, Any], before: tuple[tuple[str, Any], ...]) -> None:
    for name in own.keys() - dict(before).keys() - TORCHS_OWN:
        del own[name]
    own.update(before)


def _give_items(thing: dict[Any, Any], before: Iterable[tuple[Any, Any]]) -> None:
    dict.clear(thing)
    for key, value in before:
        dict.__setitem__(thing, key, value)


def _give_to(base: Any) -> Callable[[Any, Iterable[Any]], None]:
    def give(thing: Any, before: Iterable[Any]) -> None:
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


def _cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def _give_cell(cell: types.CellType, before: tuple[Any, ...]) -> None:
    if before:
        cell.cell_contents = before[0]
    else:
        del cell.cell_contents


def _class_values(kind: type) -> tuple[tuple[str, Any], ...]:
    """Attributes of a class that are no part of how it is made."""
    return tuple(
        (name, value)
        for name, value in vars(kind).items()
        if not name.startswith("__") and not hasattr(type(value), "__get__")
    )


def _give_class(kind: type, before: tuple[tuple[str, Any], ...]) -> None:
    for name in dict(_class_values(kind)).keys() - dict(before).keys():
        delattr(kind, name)
    for name, value in before:
        if vars(kind).get(name, NOT_THERE) is not value:
            setattr(kind, name, value)


def _slots(thing: Any) -> Iterator[Any]:
    for kind in type(thing).__mro__:
        yield from (v for v in vars(kind).values() if isinstance(v, types.MemberDescriptorType))


def _slot_values(thing: Any) -> tuple[tuple[Any, Any], ...]:
    found = []
    for slot in _slots(thing):
        try:
            found.append((slot, slot.__get__(thing)))
        except AttributeError:
            found.append((slot, NOT_THERE))
    return tuple(found)


def _give_slots(thing: Any, before: Iterable[tuple[Any, Any]]) -> None:
    now = dict(_slot_values(thing))
    for slot, value in before:
        if value is not NOT_THERE:
            slot.__set__(thing, value)
        elif now[slot] is not NOT_THERE:
            slot.__delete__(thing)
