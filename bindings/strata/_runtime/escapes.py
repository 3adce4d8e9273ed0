"""Finds views of parameters that live on when nobody has the unit entered.

    views = Views(state)               # the parameters lie in the session's memory by now
    output = views.copied_out(output)  # what a module returns may leave it
    views.mark(tensor, index)          # a view of parameter `index` is a paged tensor from now on
    views.check(unit)                  # the unit is about to be left
    views.move(index, values)          # the views are of other memory from now on

Invariant: while nobody has a unit entered, every tensor over its memory is a paged one.

Note [Escapes]. A forward may keep `self.p[:16]` in an attribute, a closure or an object of any
class. So what is looked at is the memory: each parameter has a storage of its own, which counts the
tensors over it. More than are known means that a view lives on. Only then Python's objects are
searched for it, the youngest first, and it is turned into a paged tensor where it lies.
    - Nodes of autograd keep parameters by unit (saved.py), so they do not count.
    - A gradient on its way through a backward, which a custom function returned from its saved
      tensors, is read by autograd past any class of Python: it gets memory of its own.
    - Where no Python object is found, C++ has the view: that raises.

Note [Moves]. In PyTorch a view of a parameter (`backup = p.data`) sees what is done to it in place,
and keeps the old memory where the parameter is given another (`p.data = average`). Here a parameter
stays in its pages. So it is the views that move: they get memory of their own, which they share as
before, with the values of that moment. They are plain tensors then. So do tensors
of the user's that took its memory unseen (`ours.data, p.data = p.data, ours.data`): to find them,
Python's objects are searched once for each parameter.

Limits: arrays of NumPy and addresses that were taken inside of a forward, or of a custom function's
backward, look like the tensor they were taken from. They are true while the unit is entered.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._config.sharding import shard_of
from .._errors import StrataError
from .._torch_compat import (
    DisableTorchFunction,
    graph_task,
    held_by_torch,
    is_dtensor,
    tensors_over,
)
from .geometry import Geometry
from .paged import PagedTensor
from .unit import Unit
from .wrapped import Slot, Wrapped

GENERATIONS = (0, 1, 2)  # of Python's garbage collector, the youngest objects first


class Views:
    """The tensors over the memory of one model's parameters.

    Invariant: _expected[i] counts the model's own tensors over parameter i, and _known[i].
    """

    def __init__(self, state: Wrapped) -> None:
        """REQUIRES: no view has been made yet."""
        self._state = state
        storages = [alias.untyped_storage()._cdata for alias in state.aliases]
        self._storages = storages
        self._index_of = {storage: i for i, storage in enumerate(storages)}
        self._of_unit = [[(storages[i], i) for i in unit.params] for unit in state.units]
        self._expected = [tensors_over(storage) for storage in storages]
        self._known: list[dict[int, weakref.ref[Any]]] = [{} for _ in storages]
        bases = [alias._base for alias in state.aliases]
        self.found = 0  # views that outlived a visit, so far
        self._own = {id(t) for t in (*state.params, *state.aliases, *bases) if t is not None}

    def check(self, unit: Unit, failing: bool = False) -> None:
        """Turns views that outlive this visit of the unit into paged tensors.

        Raises StrataError where one cannot be, unless an exception ends the visit (`failing`).
        """
        expected = self._expected
        for storage, index in self._of_unit[unit.index]:
            if tensors_over(storage) > expected[index]:
                self._find_escaped(storage, index, failing)

    def mark(self, tensor: torch.Tensor, index: int) -> None:
        """Makes a view of parameter `index` a paged tensor, which counts for as long as it lives.

        REQUIRES: its class is torch's own.
        """
        state = self._state
        if type(tensor) is nn.Parameter:
            tensor._strata_class = nn.Parameter  # type: ignore[attr-defined]
        tensor.__class__ = PagedTensor
        tensor._strata = Slot(state, index, state.unit_of[index])  # type: ignore[attr-defined]
        known, expected, key = self._known[index], self._expected, id(tensor)

        def forget(_: Any) -> None:
            del known[key]
            expected[index] -= 1

        known[key] = weakref.ref(tensor, forget)
        expected[index] += 1

    def move(self, index: int, memory: Callable[[], torch.Tensor]) -> None:
        """See Note [Moves]. `memory` gives the values that views of parameter `index` keep, and is
        called where there are any. REQUIRES: it is contiguous, as the parameter."""
        storage = self._storages[index]
        if tensors_over(storage) > self._expected[index]:  # other.data = p.data, see paged.py
            self._find_escaped(storage, index, failing=False)
        known = self._known[index]
        views = [view for ref in list(known.values()) if (view := ref()) is not None]
        if not views:
            return
        with torch.inference_mode(False), torch.no_grad():
            values = memory()
            for view in views:
                self._leave(view, index)
                view.data = Geometry(view).over(values)

    def leave(self, view: PagedTensor) -> None:
        """A view has got the memory of another tensor: it is a plain one from now on."""
        self._leave(view, view._strata.index)

    def take_back(self, index: int) -> None:
        """Behind a forward that gave its parameter other memory (`self.p.data = value`): it gets
        its own back, with those values. REQUIRES: it is a plain one, and its unit is entered.

        Raises RuntimeError where they are no values for it.
        """
        state = self._state
        parameter, alias = state.params[index], state.aliases[index]
        with torch.no_grad():
            value = parameter.detach()
            parameter.data = alias
            state.check_like(index, value)
            self.move(index, alias.clone)
            alias.copy_(value)
        state.note_write(index)

    def _leave(self, view: Any, index: int) -> None:
        if self._known[index].pop(id(view), None) is not None:
            self._expected[index] -= 1
        view.__class__ = view.__dict__.pop("_strata_class", torch.Tensor)
        del view._strata

    def copied_out(self, value: Any) -> Any:
        """What a module returns, with copies in the place of views: plain tensors serve everybody
        behind it. Containers are made anew, so a list of the module's own keeps its views."""
        if type(value) is torch.Tensor:
            return self._copied(value)
        if self._state.shards is not None and is_dtensor(value):
            return value.clone() if self._state.find(shard_of(value).data_ptr()) >= 0 else value
        if isinstance(value, dict):
            return self._made_anew(value, value.items(), type(value).__setitem__)
        if type(value) is list:
            return self._made_anew(value, enumerate(value), list.__setitem__)
        if type(value) is tuple or hasattr(type(value), "_make"):
            items = [self.copied_out(item) for item in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                return getattr(value, "_make", tuple)(items)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            members = [(f.name, getattr(value, f.name)) for f in fields if hasattr(value, f.name)]
            return self._made_anew(value, members, object.__setattr__)
        return value

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._state.under(tensor)
        if index < 0:
            return tensor
        copied = tensor.clone()
        self.mark(tensor, index)
        return copied

    def _made_anew(
        self, value: Any, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None]
    ) -> Any:
        copied = [(key, item, self.copied_out(item)) for key, item in items]
        changed = [(key, after) for key, before, after in copied if after is not before]
        if not changed:
            return value
        made = copy.copy(value)
        for key, after in changed:
            put(made, key, after)
        return made

    def _find_escaped(self, storage: int, index: int, failing: bool) -> None:
        """See Note [Escapes]."""
        for generation in GENERATIONS:
            for tensor in list(self._unknown(generation)):
                self._take(tensor, failing)
                self.found += 1
                del tensor
            if tensors_over(storage) <= self._expected[index]:
                return
        gc.collect()  # it may have been part of a cycle that nobody can reach any more
        if tensors_over(storage) <= self._expected[index] or failing:
            return
        raise StrataError(
            f"a view of parameter {self._state.names[index]!r} lives on behind the module that "
            "made it, where Python cannot see it: it would read other parameters' bytes there; "
            "keep a copy (p.detach().clone()) instead"
        )

    def _unknown(self, generation: int) -> Iterator[torch.Tensor]:
        """Tensors over any parameter's memory that are neither the model's own nor paged."""
        for found in gc.get_objects(generation):
            if issubclass(type(found), torch.Tensor) and id(found) not in self._own:
                index = self._index_of.get(_storage_of(found), -1)
                if index >= 0 and id(found) not in self._known[index]:
                    yield found

    def _take(self, tensor: torch.Tensor, failing: bool) -> None:
        """Makes a tensor one that may outlive the visit. See Note [Escapes]."""
        plain = type(tensor) is torch.Tensor
        if plain and graph_task() != -1 and held_by_torch(tensor):  # autograd
            with torch.no_grad(), DisableTorchFunction():
                tensor.data = tensor.detach().clone()
            return
        index = self._index_of[_storage_of(tensor)]
        if plain or type(tensor) is nn.Parameter:
            self.mark(tensor, index)
        elif not failing:
            raise StrataError(
                f"a view of parameter {self._state.names[index]!r} lives on behind the module that "
                f"made it, as a {type(tensor).__name__}, whose class strata does not know: it "
                "would read other parameters' bytes there; keep a copy (p.detach().clone()) instead"
            )


def _storage_of(tensor: torch.Tensor) -> int:
    """What tells storages apart; 0 for tensors that have none."""
    try:
        with DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
