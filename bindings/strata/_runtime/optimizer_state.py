"""The state of an optimizer, as users see it: parameter by parameter, of tensors without memory.

    optimizer.state[p]["exp_avg"].norm()         # of the values as they are now
    optimizer.state[p]["exp_avg"].zero_()        # ... and they are written back
    del optimizer.state[p]                       # begins anew with the next step

    kept = Kept(pages, index, "exp_avg", shape, torch.float32, read)
    is_there(entry["exp_avg"], state, index, "exp_avg")      # True: nothing to load

As in PyTorch, optimizer.state and a state dict show the state as it is when it is looked at, not as
it was: a copy of then is copy.deepcopy(optimizer.state_dict()). Each look reads one tensor from its
pages, in float32, and forgets it; torch.save has one at a time in memory. What is changed in place
in optimizer.state is written to the pages. What is changed in a state dict becomes a copy, for
another optimizer may train with it; load_state_dict() takes it over. A view of a tensor is one of
these, too, and does as much (Note [Views]). What is replaced, and somebody holds, keeps its values
(Note [Held]).

Note [Held]. In PyTorch an entry that was taken out of optimizer.state, or a tensor of it, stays
what it is when another one takes its place: two parameters may exchange their entries, and what was
kept may be put back. So before pages are written, what somebody holds of them gets copies in
ordinary memory: tensors of the names that change and, where an entry is replaced, the entry.

Note [Views]. What an operation returns over the same memory would be a view of a copy: changes of
it would be lost. It is replaced by a View, which makes the operation again, on the values as they
are, whenever it is looked at, and writes all of them back where it is changed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from .._torch_compat import make_wrapper
from .stand_in import StandIn, replaced
from .tensor_functions import Function

if TYPE_CHECKING:
    from .optimizer_pages import StatePages
    from .wrapped import Wrapped


class Kept:
    """One tensor of the state of one parameter."""

    def __init__(
        self,
        pages: StatePages,
        index: int,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        live: bool,
    ) -> None:
        """`live`: changes are written back."""
        self.name = name
        self.place: tuple[int, int, str] | None = (id(pages.wrapped), index, name)
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.memory = 0  # of what open() returned last
        self._pages = pages
        self._index = index
        self._read = read
        self._live = live
        self._copy: torch.Tensor | None = None  # it was changed in place, and is not live

    def open(self) -> torch.Tensor:
        """The values, as they are now."""
        if self._copy is not None:
            return self._copy
        state = self._pages.wrapped
        wait_for_updates(state)
        if not self._pages.has_state(self._index):
            raise RuntimeError(
                f"{self.name!r} of {state.names[self._index]!r} is not in the optimizer's state "
                "any more, which begins anew with the next step: copy it (clone()) before that"
            )
        # Not one of a user's inference mode: its version tells whether it was changed.
        with torch.inference_mode(False), torch.no_grad():
            values = self._read()
        self.memory = values.untyped_storage().data_ptr()
        return values

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """What was changed is the state from here on, or a copy."""
        if changed and self._live and self._copy is None:
            self._pages.write_tensor(self._index, self.name, values)
        elif changed:
            self._copy, self.place = values, None

    def keep(self) -> None:
        """Another one takes its place: the values of now are its own. See Note [Held]."""
        if self._copy is None:
            self._copy, self.place = self.open(), None


Open = Callable[["StandIn"], torch.Tensor]


class View:
    """What an operation returned over the memory of such a tensor. See Note [Views]."""

    def __init__(self, of: Kept | View, again: Callable[[Open], torch.Tensor], like: Any) -> None:
        """`again` makes the operation on values that it is given; `like`: what it returned."""
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        place: tuple[int, int, str] | None = of.place
        self.place: tuple[int, int, str] | None = place and (*place[:2], "")
        self._of, self._again = of, again

    @property
    def memory(self) -> int:
        """Of what open() returned last."""
        return self._of.memory

    def open(self) -> torch.Tensor:
        """The values, as they are now."""
        whole, of = self._of.open(), self._of
        with torch.inference_mode(False), torch.no_grad():
            values = self._again(
                lambda each: whole if each._strata_values is of else each._strata_values.open()
            )
        values._strata_whole = whole  # type: ignore[attr-defined]
        return values

    def close(self, values: torch.Tensor, changed: bool) -> None:
        """What was changed is the state from here on."""
        if changed:
            self._of.close(values._strata_whole, changed=True)  # type: ignore[attr-defined]


class StateTensor(StandIn):
    """A tensor of the optimizer's state: its shape and dtype, and no memory."""

    _strata_values: Kept | View

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch instead of any operation that has one among its arguments."""
        if func is torch.Tensor.__iter__:
            return iter(args[0].unbind(0))
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        given: list[StateTensor] = []

        def note(each: StateTensor) -> StateTensor:
            given.append(each)
            return each

        replaced((args, kwargs), StateTensor, note)

        def again(values_of: Open) -> Any:
            plain = replaced((args, kwargs), StandIn, values_of)
            return func(*plain[0], **plain[1])

        return _with_views(result, given, again)


def _with_views(result: Any, given: list[StateTensor], again: Callable[[Open], Any]) -> Any:
    """A result with Views in the place of tensors over the memory of those that were given."""
    if isinstance(result, tuple | list):
        each = [
            _with_views(item, given, lambda values_of, i=i: again(values_of)[i])  # type: ignore[misc]
            for i, item in enumerate(result)
        ]
        return (
            each if any(new is not old for new, old in zip(each, result, strict=True)) else result
        )
    if not isinstance(result, torch.Tensor) or isinstance(result, StandIn):
        return result
    memory = result.untyped_storage().data_ptr()
    for one in given:
        if memory and one._strata_values.memory == memory:
            view: Any = make_wrapper(
                StateTensor,
                result.shape,
                strides=result.stride(),
                storage_offset=result.storage_offset(),
                dtype=result.dtype,
                device=result.device,
            )
            view._strata_values = View(one._strata_values, again, result)
            return view
    return result


_NO_DEFAULT: Any = object()


class ParameterState(MutableMapping[str, Any]):
    """optimizer.state[p]. Empty before the first step of the parameter."""

    def __init__(self, pages: StatePages, index: int) -> None:
        self._pages = pages
        self._index = index
        self._own: dict[str, Any] | None = None  # another entry has taken its place

    def keep(self) -> None:
        """Another entry takes its place: what there is now is its own. See Note [Held]."""
        self._own = self._pages.shown(self._index)

    def _entries(self) -> dict[str, Any]:
        if self._own is not None:
            return self._own
        wait_for_updates(self._pages.wrapped)
        return self._pages.shown(self._index)

    def _change(self, entries: dict[str, Any]) -> None:
        """Raises as StatePages.replace() does for what the class does not keep."""
        if self._own is not None:
            self._own = entries
        else:
            self._pages.change(self._index, entries)

    def __getitem__(self, name: str) -> Any:
        return self._entries()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        entries = dict(self._entries())
        del entries[name]
        self._change(entries)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """All at once, so that a state may be made of its parts."""
        self._change(self._entries() | dict(*args, **kwargs))

    def clear(self) -> None:
        """It begins anew with the next step."""
        self._change({})

    def pop(self, name: str, default: Any = _NO_DEFAULT) -> Any:
        """Removes a tensor, and returns a copy of it."""
        if name not in self and default is not _NO_DEFAULT:
            return default
        found = copy.deepcopy(self[name])
        del self[name]
        return found

    def copy(self) -> dict[str, Any]:
        """The same tensors."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Plain tensors in ordinary memory."""
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)

    def __repr__(self) -> str:
        return repr(dict(self))


class OptimizerState(MutableMapping[torch.Tensor, Any]):
    """optimizer.state: the parameters that have made a step, and what is kept of each."""

    def __init__(self, pages: StatePages) -> None:
        self._pages = pages
        self._own: dict[torch.Tensor, Any] | None = None  # another mapping has taken its place

    def keep(self) -> None:
        """Another mapping takes its place: the entries of now are its own. See Note [Held]."""
        self._own = dict(self.items())

    def _index(self, parameter: Any) -> int:
        index = self._pages.members().get(parameter) if torch.is_tensor(parameter) else None
        if index is None:
            raise KeyError(
                "strata keeps a state of the optimizer's own parameters, and no other: keep what "
                "is yours in a dictionary of your own"
            )
        return index

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        """Also of one that has made no step, which is empty: torch's is a defaultdict."""
        if self._own is not None:
            return self._own.setdefault(parameter, {})
        return self._pages.entry(self._index(parameter))

    def __contains__(self, parameter: object) -> bool:
        if self._own is not None:
            return parameter in self._own
        members = self._pages.members()
        return torch.is_tensor(parameter) and parameter in members and bool(self[parameter])

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._own is not None:
            return iter(self._own)
        wait_for_updates(self._pages.wrapped)
        return (p for p, index in self._pages.members().items() if self._pages.shown(index))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, parameter: torch.Tensor, entry: Any) -> None:
        if self._own is not None:
            self._own[parameter] = entry
            return
        self._pages.replace({self._index(parameter): entry})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        if self._own is not None:
            del self._own[parameter]
            return
        self._pages.replace({self._index(parameter): {}})

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: Any, default: Any = _NO_DEFAULT) -> Any:
        """Removes the state of a parameter, and returns a copy of it."""
        if parameter not in self and default is not _NO_DEFAULT:
            return default
        found = copy.deepcopy(dict(self[parameter]))
        del self[parameter]
        return found

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        if parameter not in self:
            self[parameter] = default or {}
        return self[parameter]

    def replace(self, entries: Mapping[torch.Tensor, Any]) -> None:
        """Takes over the states of all parameters; what has no entry begins anew."""
        if self._own is not None:
            self._own = dict(entries)
            return
        found = {self._index(parameter): entry for parameter, entry in entries.items()}
        self._pages.replace(
            {index: found.get(index, {}) for index in self._pages.members().values()}
        )

    def clear(self) -> None:
        """All begin anew with the next step."""
        self.replace({})

    def copy(self) -> dict[torch.Tensor, Any]:
        """The same states."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[torch.Tensor, Any]:
        """Plain tensors in ordinary memory, of the same parameters."""
        return defaultdict(dict, {p: copy.deepcopy(entry, memo) for p, entry in self.items()})

    def __reduce__(self) -> Any:
        raise TypeError(
            "optimizer.state of a wrapped model cannot be pickled, for its keys are parameters in "
            "pages: write optimizer.state_dict()"
        )

    def __repr__(self) -> str:
        return f"<strata: the optimizer's state of {len(self)} parameters>"


def wait_for_updates(state: Wrapped) -> None:
    """Waits for the updates that are on their way. Raises where the state cannot be read."""
    if state.model.__dict__.get("_strata") is not state:
        raise RuntimeError(
            "this is the optimizer state of a model that strata.unwrap() has taken back: copy it "
            "(copy.deepcopy(optimizer.state_dict())) ahead of that"
        )
    state.hooks.reset()
    state.refuse_half_step("a look at the optimizer's state")
    state.synchronize()


def is_there(value: Any, state: Wrapped, index: int, name: str) -> bool:
    """Whether a value that is to be loaded is the very one that it would replace."""
    return isinstance(value, StateTensor) and value._strata_values.place == (id(state), index, name)


def without_others(entry: Any, state: Wrapped, index: int) -> Any:
    """An entry that is to be loaded. What it shows of another parameter is copied: that may be
    loaded over before this one's turn comes."""
    if not isinstance(entry, Mapping):
        return entry
    return {
        name: value.clone() if _is_of(value, state) and not is_there(value, state, index, name)
        else value
        for name, value in entry.items()
    }  # fmt: skip


def _is_of(value: Any, state: Wrapped) -> bool:
    place = value._strata_values.place if isinstance(value, StateTensor) else None
    return place is not None and place[0] == id(state)
