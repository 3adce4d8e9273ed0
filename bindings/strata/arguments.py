"""What a forward is called with, and what it returns: tensors taken out, and put back.

    arguments = Arguments((args, kwargs))
    arguments.tensors                        # every tensor, in order
    args, kwargs = arguments.filled(tensors) # the same nest of fresh containers around others

The nest is that of the moment when it was taken: a forward that appends to a list it was given, or
to a cache, gets both as they were when it is run again. Use from one thread at a time.

Note [Caches]. A Transformers layer that is given a cache of keys and values adds its own, and would
do so again when it is recomputed. So the cache is copied without the tensors of other layers, which
would otherwise live until the backward.
"""

import copy
import dataclasses
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

# Values that no forward can change, and that hold no tensors.
PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _TensorAt:
    place: int


@dataclasses.dataclass(frozen=True)
class _CacheAsBefore:
    cache: Any
    layers: frozenset[int]


class Arguments:
    """A nest of tuples, lists, dictionaries and Transformers' outputs, with tensors in it."""

    def __init__(self, nest: Any, layers: frozenset[int] = frozenset()) -> None:
        """`layers`: the places in a cache that the forward may use; empty: all."""
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []  # what is neither a tensor nor plain
        self.plain: list[Any] = []
        self._layers = layers
        self._nest = _rebuild(nest, self._take)

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nest with these tensors in the place of its own."""

        def put(leaf: Any) -> Any:
            if type(leaf) is _TensorAt:
                return tensors[leaf.place]
            if type(leaf) is _CacheAsBefore:
                return _copy_cache(leaf.cache, leaf.layers)
            return leaf

        return _rebuild(self._nest, put)

    def drop_tensors(self) -> None:
        """Keeps the nest only."""
        self.tensors = []

    def _take(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf)
            return _TensorAt(len(self.tensors) - 1)
        if isinstance(leaf, PLAIN_TYPES):
            self.plain.append(leaf)
            return leaf
        self.others.append(leaf)
        if _is_cache(leaf):
            return _CacheAsBefore(_copy_cache(leaf, self._layers), self._layers)
        return leaf


def layers_of(module: nn.Module) -> frozenset[int]:
    """The places in a cache that a module uses, as Transformers number them."""
    found = (getattr(m, "layer_idx", None) for m in module.modules())
    return frozenset(place for place in found if type(place) is int)


def _rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_rebuild(item, leaf) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_rebuild(item, leaf) for item in value))
    if kind is dict or kind is OrderedDict:
        return kind((key, _rebuild(item, leaf)) for key, item in value.items())
    if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
        return kind(**{key: _rebuild(item, leaf) for key, item in value.items()})
    return leaf(value)


def _is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _copy_cache(cache: Any, layers: Iterable[int]) -> Any:
    """See Note [Caches]."""
    wanted = frozenset(layers)

    def copied(value: Any) -> Any:
        if _is_cache(value):
            return _copy_cache(value, wanted)
        if type(value) is list:
            return [
                copy.copy(item) if not wanted or place in wanted else None
                for place, item in enumerate(value)
            ]
        return dict(value) if type(value) is dict else value

    result = copy.copy(cache)
    result.__dict__.update((name, copied(value)) for name, value in vars(cache).items())
    return result
