"""What a forward is called with, and what it returns: tensors taken out, and put back.

    arguments = Arguments((args, kwargs))
    arguments.tensors                        # every tensor once, in order
    args, kwargs = arguments.filled(tensors) # the same nest of fresh containers around others

The nest is that of the moment when it was taken: a forward that appends to a list it was given, or
to a cache, gets both as they were when it is run again. Use from one thread at a time.

Note [Caches]. A Transformers layer that is given a cache of keys and values adds its own, and would
do so again when it is recomputed. So a cache is taken apart like a container. What it holds for
other layers is left out: it would otherwise live until the backward.
"""

import dataclasses
import enum
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._runtime.paged_run import is_paged

# Values that no forward can change, and that hold no tensors.
PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _TensorAt:
    place: int


@dataclasses.dataclass(frozen=True)
class _Object:
    """A cache, or what one holds for a layer."""

    kind: type
    state: dict[str, Any]


class Arguments:
    """A nest of tuples, lists, dictionaries, Transformers' outputs and caches, with tensors in it.

    Invariant: tensors[i] lies within a cache iff i is in `cached`.
    """

    def __init__(self, nest: Any, layers: frozenset[int] = frozenset()) -> None:
        """`layers`: the places in a cache that the forward may use; empty: all."""
        self.tensors: list[torch.Tensor] = []
        self.plain: list[Any] = []
        self.caches: list[Any] = []
        self.others: list[Any] = []
        self.cached: set[int] = set()
        self.layers = layers
        self._places: dict[tuple[int, bool], int] = {}  # by identity: an object stays one object
        self._nest = _rebuild(nest, self._take)
        self._places.clear()

    @property
    def in_memory(self) -> list[torch.Tensor]:
        """Of the tensors those that take PyTorch's memory: not parameters, which are in pages."""
        return [tensor for tensor in self.tensors if not is_paged(tensor)]

    @property
    def form(self) -> tuple[Any, ...]:
        """Flags, and the types of what is no tensor."""
        flags = tuple(p for p in self.plain if p is None or isinstance(p, bool | str))
        return flags, tuple(map(type, self.others))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nest with these tensors in the place of its own."""
        return _rebuild(self._nest, functools.partial(_put, tensors))

    def forget(self) -> None:
        """Keeps the nest only: nothing that was taken stays alive for it."""
        self.tensors, self.caches = [], []

    def _take(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._take_tensor(leaf)
        if _is_cache(leaf):
            self.caches.append(leaf)
            return self._take_cache(leaf)
        (self.plain if isinstance(leaf, PLAIN_TYPES) else self.others).append(leaf)
        return leaf

    def _take_tensor(self, tensor: torch.Tensor, cached: bool = False) -> _TensorAt:
        place = self._places.setdefault((id(tensor), cached), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
            if cached:
                self.cached.add(place)
        return _TensorAt(place)

    def _take_cache(self, cache: Any) -> _Object:
        """See Note [Caches]."""

        def take(leaf: Any) -> Any:
            if _is_cache(leaf):
                return self._take_cache(leaf)
            if isinstance(leaf, torch.Tensor):
                return self._take_tensor(leaf, cached=True)
            return leaf

        state = {
            name: _rebuild(value, take) for name, value in vars(cache).items() if name != "layers"
        }
        if hasattr(cache, "layers"):
            state["layers"] = [
                _Object(type(layer), _rebuild(vars(layer), take))
                if layer is not None and (not self.layers or place in self.layers)
                else None
                for place, layer in enumerate(cache.layers)
            ]
        return _Object(type(cache), state)


def _put(tensors: Sequence[torch.Tensor], leaf: Any) -> Any:
    """The leaf of a nest as a forward gets it. No closure that calls itself: it would be a cycle,
    and hold the tensors until Python looks for garbage."""
    if type(leaf) is _TensorAt:
        return tensors[leaf.place]
    if type(leaf) is _Object:
        made: Any = object.__new__(leaf.kind)
        made.__dict__.update(_rebuild(leaf.state, functools.partial(_put, tensors)))
        return made
    return leaf


def update_cache(cache: Any, newer: Any) -> None:
    """Gives a cache what a copy of it has learnt since."""
    for name, value in vars(newer).items():
        if _is_cache(value):
            update_cache(getattr(cache, name), value)
        elif name == "layers":
            for place, layer in enumerate(value):
                if place == len(cache.layers):
                    cache.layers.append(layer)
                elif layer is not None:
                    cache.layers[place].__dict__.update(vars(layer))
        else:
            setattr(cache, name, value)


def layers_of(module: nn.Module) -> frozenset[int]:
    """The places in a cache that a module uses, as Transformers number them."""
    found = (getattr(m, "layer_idx", None) for m in module.modules())
    return frozenset(place for place in found if type(place) is int)


def _rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_rebuild(item, leaf) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Its own constructor may look inside.
        return tuple.__new__(kind, (_rebuild(item, leaf) for item in value))
    if kind is dict or kind is OrderedDict:
        return kind((key, _rebuild(item, leaf)) for key, item in value.items())
    if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
        return kind(**{key: _rebuild(item, leaf) for key, item in value.items()})
    return leaf(value)


def _is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order. Nothing else is opened."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
