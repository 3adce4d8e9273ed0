"""What becomes of the tensors that autograd saves: parameters are kept by unit, not by value, and
what the plan wants off the device is swapped.

    before = saved.pushed()
    saved.push()             # from now on autograd calls pack() for each tensor that it saves
    ...
    saved.pop_to(before)

Note [Checkpoint]. torch.utils.checkpoint drops what its own pack hook is given and computes it
again inside backward. Our pack stands above it and keeps parameters from it (they need no
recomputing), in both runs alike. Where a parameter is used outside its module the order of the
hooks may differ between the two runs, so there checkpoint gets the parameter, and the unit stays
entered until its gradients have landed or the backward is over.

Of a unit that is recomputed, what checkpoint saves for itself are the inputs, before it drops the
rest: that comes to pack() alone, and leaves the device where the plan says so.

Note [Versions]. torch does not check version counters of tensors that hooks have packed, so
unpack() does. For parameters it also notices step(), which changes them without torch's knowing.

Note [Balance]. torch keeps one stack of hooks for everybody on a thread, and whoever leaves pops
what lies on top. Where an exception kept us from popping, somebody further out (a checkpoint, a
user's `with`) has popped ours in place of his own. So we pop as many as we have pushed, whoever's
they are. Pushing and counting are one call of C, which no signal handler can come between. In a
backward autograd puts the stack back by itself, behind every node.

Note [Cycles]. A node may save its own output, which refers to the node. torch sees that for what it
saves itself, not for what hooks return, so pack() keeps a detached tensor. Otherwise a graph that
is dropped without a backward would never be freed.
"""

import threading
from dataclasses import dataclass
from itertools import starmap
from typing import Any, cast

import torch

from .._activations.swapped import SwappedView, changed
from .._activations.swapping import Swapping
from .._config.choices import SWAPS
from .._config.sharding import Sharding, shard_of
from .._profiling.recorder import NOT_RECORDED
from .._runtime.geometry import Geometry
from .._runtime.paged_run import is_paged
from .._runtime.unit import Unit
from .._runtime.wrapped import Wrapped
from .._torch_compat import (
    DisableTorchFunction,
    graph_task,
    hooks_allowed,
    is_dtensor,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from .exchanged import FORBIDDEN
from .frames import Frames
from .pins import Pins

# What pack() returns is a SwappedView, a Spread, a Recorded, or a tuple, told apart by its length.
KEPT_AS_IS = 2  # tensor, its version counter or UNKNOWN
KEPT_BY_OTHERS = 3  # unpack of the hooks below ours, what their pack returned, None
# Alias or Geometry, version of the parameter, unit, index of the parameter.
KEPT_BY_UNIT = 4
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Spread:
    """What pack() returns for a DTensor: what it is, and its shard, packed."""

    sharding: Sharding
    packed: Any


@dataclass(slots=True, eq=False)
class Recorded:
    """What pack() returns otherwise, and the recorder's number for it."""

    packed: Any
    number: int


class _Pushed(threading.local):
    """One entry for each time that we have pushed and not popped, on this thread."""

    def __init__(self) -> None:
        self.outside: list[None] = []
        self.in_backward: list[None] = []


class SavedTensors:
    """Packs and unpacks for one model. `frames`: its modules now running."""

    def __init__(self, state: Wrapped, pins: Pins, swapping: Swapping, frames: Frames) -> None:
        self.swapping = swapping
        self.state = state
        self._pins = pins
        self._frames = frames
        self._stack = _Pushed()
        # Bound once: the same objects are recognised when they lie on top of torch's stack.
        self.pack_hook = self.pack
        self.unpack_hook = self.unpack

    def push(self) -> None:
        """Puts pack and unpack on top of torch's stack, if they are not there already. Raises
        RuntimeError where torch lets nobody."""
        if not hooks_allowed():
            raise RuntimeError(FORBIDDEN)
        top = top_hooks(True)
        if top is None:
            self.push_these(self.pack_hook, self.unpack_hook)
        elif not self._is_ours(top[0]):
            self.push_these(_Above(self, *top).pack, self.unpack_hook)

    def push_these(self, pack: Any, unpack: Any) -> None:
        """Puts other hooks there."""
        self._mine().extend(starmap(push_hooks, ((pack, unpack),)))

    def pushed(self) -> int:
        """How many hooks of ours are to be popped."""
        return len(self._mine())

    def pop_to(self, count: int) -> None:
        """Pops until so many are left. See Note [Balance]."""
        stack = self._mine()
        while len(stack) > count:
            # pop_hooks returns None, which is left out: the last entry goes.
            stack[-1:] = filter(None, starmap(pop_hooks, ((),)))

    def reset(self) -> None:
        """Undoes what an exception left behind. REQUIRES: no backward and no module runs here."""
        self._stack.in_backward.clear()
        self.pop_to(0)

    def _mine(self) -> list[None]:
        return self._stack.outside if graph_task() == -1 else self._stack.in_backward

    def _is_ours(self, pack: Any) -> bool:
        owner = getattr(pack, "__self__", None)
        return owner is self or (type(owner) is _Above and owner.ours is self)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called for each tensor that autograd saves. Parameters are kept by unit, not by value."""
        state = self.state
        if state.shards is not None and is_dtensor(tensor):
            return Spread(Sharding.of(tensor), self.pack(shard_of(tensor)))  # type: ignore[arg-type]
        if is_paged(tensor):
            return self.keep_paged(tensor)
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse and symbolic tensors have none, and are not ours
            return (tensor, UNKNOWN)
        if state.low <= address < state.high:
            index = state.find(address)
            if index >= 0:
                return self.keep_by_unit(tensor, index)
        if frames := self._frames.mine():
            unit = frames[-1].unit
            if unit.activation in SWAPS or state.recorder.recording:
                return self._pack_activation(tensor, unit, frames[-1])
        return _as_is(tensor)

    def _pack_activation(self, tensor: torch.Tensor, unit: Unit, frame: object) -> Any:
        if graph_task() != -1:  # a recomputation: backward wants it at once
            return _as_is(tensor)
        packed: Any = None
        if unit.activation in SWAPS:
            packed = self.swapping.pack(tensor, unit, frame)
        return self.record(tensor, _as_is(tensor) if packed is None else packed)

    def keep_paged(self, tensor: Any) -> Any:
        """What pack() returns for a parameter outside its module that a custom function or a
        checkpoint saves: it was an argument there. It may be of another model."""
        owner: SavedTensors = tensor._strata.state.hooks.saved
        with DisableTorchFunction():
            packed = owner.keep_by_unit(tensor, tensor._strata.index)
        return packed if owner is self else (owner.unpack_hook, packed, None)

    def keep_by_unit(self, tensor: torch.Tensor, index: int) -> Any:
        """What pack() returns for a tensor in the memory of parameter `index`."""
        state = self.state
        parameter = state.params[index]
        kept = state.aliases[index] if tensor is parameter else Geometry(tensor)
        # Its own forward may have changed it just now: the core hears of that when the unit leaves.
        plain = type(parameter) is torch.nn.Parameter
        version = parameter._version if plain else state.written[index]
        return (kept, version, state.unit_of[index], index)

    def record(self, tensor: torch.Tensor, packed: Any) -> Any:
        """Tells the recorder of a tensor that is saved in a unit's forward."""
        recorder = self.state.recorder
        if recorder.recording and (frames := self._frames.mine()) and graph_task() == -1:
            number = recorder.saved(frames[-1].unit.index, tensor)
            if number != NOT_RECORDED:
                return Recorded(packed, number)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        """Called when a node wants a saved tensor back, or when Python code reads it."""
        if type(packed) is not tuple:
            return self._unpack_activation(packed)
        if len(packed) == KEPT_BY_OTHERS:
            return cast(torch.Tensor, packed[0](packed[1]))
        if len(packed) == KEPT_AS_IS:
            tensor, version = packed
            if version != UNKNOWN and tensor._version != version:
                raise changed(tuple(tensor.shape), "it was changed in place")
            return cast(torch.Tensor, tensor)
        kept, version, unit, index = packed
        if self.state.written[index] != version:
            raise changed(self.state.names[index], "it was updated by step() or in place")
        self._pins.pin(unit)
        self.state.check_old(index)
        if torch.is_grad_enabled() and graph_task() != -1:
            self.push()  # create_graph: the node saves tensors too. Autograd pops it with the node
        if type(kept) is Geometry:
            return kept.over(self.state.aliases[index])
        return cast(torch.Tensor, kept)

    def _unpack_activation(self, packed: Recorded | Spread | SwappedView) -> torch.Tensor:
        if type(packed) is Spread:
            shard = self.unpack(packed.packed)
            with torch.no_grad():
                return packed.sharding.whole(shard)
        if type(packed) is Recorded:
            self.state.recorder.used(packed.number)
            return self.unpack(packed.packed)
        self._pins.watch()
        return self.swapping.unpack(cast(SwappedView, packed))

    def hold_outside(self, unit: Unit) -> None:
        """Ahead of an operation on a parameter outside its module, whose unit is to be entered."""
        if graph_task() != -1 and _under_checkpoint():
            self._pins.hold(unit)  # see Note [Checkpoint]

    def push_outside(self) -> None:
        """For such an operation, once the unit is entered."""
        if not _under_checkpoint():
            self.push()


def _under_checkpoint() -> bool:
    top = top_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


@dataclass(slots=True, eq=False)
class _Above:
    """Our hooks above somebody else's, which still get every tensor that is not a parameter."""

    ours: SavedTensors
    outer_pack: Any
    outer_unpack: Any

    def pack(self, tensor: torch.Tensor) -> Any:
        """As SavedTensors.pack, which see."""
        ours = self.ours
        if ours.state.shards is not None and is_dtensor(tensor):
            shard = shard_of(tensor)
            if ours.state.find(shard.data_ptr()) >= 0:
                return Spread(Sharding.of(tensor), ours.pack(shard))  # type: ignore[arg-type]
        if is_paged(tensor):
            return ours.keep_paged(tensor)
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return (self.outer_unpack, self.outer_pack(tensor), None)
        index = ours.state.find(address)
        if index >= 0:
            return ours.keep_by_unit(tensor, index)
        return ours.record(tensor, (self.outer_unpack, self.outer_pack(tensor), None))


def _as_is(tensor: torch.Tensor) -> Any:
    kept = tensor if tensor.is_leaf else tensor.detach()  # see Note [Cycles]
    return (kept, tensor._version)
