"""What becomes of the tensors that autograd saves: parameters are kept by unit, not by value, and
what the plan wants off the device is swapped.

    saved.push()             # from now on autograd calls pack() for each tensor that it saves
    ...
    saved.pop()

Note [Checkpoint]. torch.utils.checkpoint drops what its own pack hook is given and computes it
again inside backward. Our pack stands above it and keeps parameters from it (they need no
recomputing), in both runs alike. Where a parameter is used outside its module the order of the
hooks may differ between the two runs, so there checkpoint gets the parameter, and the unit stays
entered until its gradients have landed or the backward is over.

Note [Versions]. torch does not check version counters of tensors that hooks have packed, so
unpack() does. For parameters it also notices step(), which changes them without torch's knowing.

Note [Cycles]. A node may save its own output, which refers to the node. torch sees that for what it
saves itself, not for what hooks return, so pack() keeps a detached tensor. Otherwise a graph that
is dropped without a backward would never be freed.
"""

from typing import Any, cast

import torch

from .pins import Pins
from .recorder import NOT_RECORDED
from .swapped import SwappedView, changed
from .swapping import SWAPS, Swapping
from .wrapped import Unit, Wrapped

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id

# What pack() returns is a SwappedView, a Recorded, or a tuple, told apart by its length.
KEPT_AS_IS = 2  # tensor, its version counter or UNKNOWN
KEPT_BY_OTHERS = 3  # unpack of the hooks below ours, what their pack returned, None
KEPT_BY_UNIT = 4  # alias, version of the parameter, unit, index of the parameter
UNKNOWN = -1


class Recorded:
    """What pack() returns otherwise, and the recorder's number for it."""

    __slots__ = ("number", "packed")

    def __init__(self, packed: Any, number: int) -> None:
        self.packed = packed
        self.number = number


class SavedTensors:
    """Packs and unpacks for one model. `frames`: its modules now running, innermost last."""

    def __init__(
        self, state: Wrapped, pins: Pins, swapping: Swapping, frames: list[tuple[Any, bool]]
    ) -> None:
        self.swapping = swapping
        self.state = state
        self._pins = pins
        self._frames = frames
        # Bound once: the same objects are recognised when they lie on top of torch's stack.
        self.pack_hook = self.pack
        self.unpack_hook = self.unpack

    def push(self) -> bool:
        """Puts pack and unpack on top of torch's stack, if they are not there already."""
        top = _top_hooks(True)
        if top is None:
            _push_hooks(self.pack_hook, self.unpack_hook)
        elif self._is_ours(top[0]):
            return False
        else:
            _push_hooks(_Above(self, *top).pack, self.unpack_hook)
        return True

    def _is_ours(self, pack: Any) -> bool:
        owner = getattr(pack, "__self__", None)
        return owner is self or (type(owner) is _Above and owner.ours is self)

    def on_top(self) -> bool:
        """Whether our hooks are the ones that torch would call now."""
        top = _top_hooks(True)
        return top is not None and self._is_ours(top[0])

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called for each tensor that autograd saves. Parameters are kept by unit, not by value."""
        state = self.state
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse and symbolic tensors have none, and are not ours
            return (tensor, UNKNOWN)
        if state.low <= address < state.high:
            index = state.find(address)
            if index >= 0:
                return self.keep_by_unit(tensor, index)
        if self._frames:
            unit = self._frames[-1][0].unit
            if unit.activation in SWAPS or state.recorder.recording:
                return self._pack_activation(tensor, unit)
        return _as_is(tensor)

    def _pack_activation(self, tensor: torch.Tensor, unit: Unit) -> Any:
        if _graph_task() != -1:  # a recomputation: backward wants it at once
            return _as_is(tensor)
        packed: Any = None
        if unit.activation in SWAPS:
            packed = self.swapping.pack(tensor, unit, self._frames[-1])
        return self.record(tensor, _as_is(tensor) if packed is None else packed)

    def keep_by_unit(self, tensor: torch.Tensor, index: int) -> Any:
        """What pack() returns for a tensor in the memory of parameter `index`."""
        state = self.state
        kept = state.aliases[index] if tensor is state.params[index] else tensor
        return (kept, state.written[index], state.unit_of[index], index)

    def record(self, tensor: torch.Tensor, packed: Any) -> Any:
        """Tells the recorder of a tensor that is saved in a unit's forward."""
        recorder = self.state.recorder
        if recorder.recording and self._frames and _graph_task() == -1:
            number = recorder.saved(self._frames[-1][0].unit.index, tensor)
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
        tensor, version, unit, index = packed
        if self.state.written[index] != version:
            raise changed(self.state.names[index], "it was updated by step() or in place")
        self._pins.pin(unit)
        if torch.is_grad_enabled() and _graph_task() != -1:
            self.push()  # create_graph: the node saves tensors too. Autograd pops it with the node
        return cast(torch.Tensor, tensor)

    def _unpack_activation(self, packed: Recorded | SwappedView) -> torch.Tensor:
        if type(packed) is Recorded:
            self.state.recorder.used(packed.number)
            return self.unpack(packed.packed)
        self._pins.watch()
        return self.swapping.unpack(cast(SwappedView, packed))

    def push_outside(self, unit: Unit) -> bool:
        """For an operation on a parameter outside its module. Returns whether hooks were pushed."""
        top = _top_hooks(True)
        if top is None or getattr(top[0], "__module__", "") != "torch.utils.checkpoint":
            return self.push()
        if _graph_task() != -1:
            self._pins.hold(unit)  # see Note [Checkpoint]
        return False

    @staticmethod
    def pop() -> None:
        """Undoes one push that returned True."""
        _pop_hooks()


class _Above:
    """Our hooks above somebody else's, which still get every tensor that is not a parameter."""

    __slots__ = ("ours", "outer_pack", "outer_unpack")

    def __init__(self, ours: SavedTensors, outer_pack: Any, outer_unpack: Any) -> None:
        self.ours = ours
        self.outer_pack = outer_pack
        self.outer_unpack = outer_unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        """As SavedTensors.pack, which see."""
        ours = self.ours
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
