"""What a forward finds in plain Python, for the same forward again: attributes of its modules, the
states of generators of random numbers, and the variables of the context.

    found = Attributes(owners_of(module))      # before the forward
    ...
    now = Attributes(owners_of(module))        # after it
    found.put_back()                           # the same forward may run again
    reason = now.differing(Attributes(...))    # "" where both runs left the same

Use from one thread at a time.

Note [Objects]. An attribute that was assigned is put back, whatever it is. What a forward changes
inside an object is neither seen nor put back here: reach.py does so, in trials. torch's own
attributes of a module (its parameters, buffers and hooks) are left out: inputs.py knows the first
two.
"""

import random
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from typing import Any

import numpy
from torch import nn

from .reach import GENERATORS, NOT_THERE, TORCHS_OWN, same

Owner = dict[str, Any]  # the attributes of one object


def owners_of(module: nn.Module, objects: Iterable[Any] = ()) -> list[Owner]:
    """The attributes of a module, of all below it, and of other objects that it may change."""
    others = [vars(o) for o in objects if hasattr(o, "__dict__") and not _is_shared(o)]
    return [*map(vars, module.modules()), *others]


def form_of(module: nn.Module) -> tuple[Any, ...]:
    """The modes of a module and all below it, and what types of attributes they have."""
    inner = list(module.modules())
    own = [(n, type(v)) for m in inner for n, v in vars(m).items() if n not in TORCHS_OWN]
    return (*(m.training for m in inner), *own)


def _is_shared(thing: Any) -> bool:
    """Whether it belongs to more than one forward, or is none that a forward changes."""
    return isinstance(thing, type | nn.Module) or callable(thing)


class Attributes:
    """Attributes and generators at one moment. See Note [Objects]."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        self.context = copy_context()  # for copies of it to run in
        self._owners = [(owner, owner.copy()) for owner in owners]
        kinds = GENERATORS
        own = {
            id(value): value for owner in owners for value in owner.values() if type(value) in kinds
        }
        self._generators = [(g, kinds[type(g)][0](g)) for g in own.values()]
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def iterator(self) -> str:
        """The name of an attribute that can be read once only; "" where there is none."""
        for _, before in self._owners:
            for name, value in before.items():
                if hasattr(type(value), "__next__"):
                    return name
        return ""

    def assigned(self, other: "Attributes") -> str:
        """The name of an attribute that has another value at another moment."""
        for (_, mine), (_, others) in zip(self._owners, other._owners, strict=True):
            for name in mine.keys() | others.keys():
                a, b = mine.get(name, NOT_THERE), others.get(name, NOT_THERE)
                if name not in TORCHS_OWN and not same(a, b):
                    return name
        return ""

    def differing(self, other: "Attributes") -> str:
        """What another moment has otherwise, in words; "" where nothing."""
        if name := self.assigned(other):
            return f"the attribute {name!r}"
        if self.drawn(other):
            return "the state of a generator"
        return ""

    def drawn(self, other: "Attributes") -> bool:
        """Whether Python's, NumPy's or a module's own generator has another state then."""
        states = {id(g): state for g, state in other._generators}
        return (
            self._python != other._python
            or not same(self._numpy, other._numpy)
            or any(not same(state, states.get(id(g), state)) for g, state in self._generators)
        )

    def put_back(self) -> None:
        """Everything is again as it was."""
        for owner, before in self._owners:
            for name in owner.keys() - before.keys() - TORCHS_OWN:
                del owner[name]
            for name, value in before.items():
                if owner.get(name, NOT_THERE) is not value and name not in TORCHS_OWN:
                    owner[name] = value
        for generator, state in self._generators:
            GENERATORS[type(generator)][1](generator, state)
        if random.getstate() != self._python:
            random.setstate(self._python)
        if not same(numpy.random.get_state(), self._numpy):
            numpy.random.set_state(self._numpy)
