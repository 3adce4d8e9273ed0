"""What becomes of the tensors that autograd saves: parameters are kept by unit, not by value.

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
"""

from typing import Any, cast

import torch

from .pins import Pins
from .wrapped import Unit, Wrapped

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id

# What pack() returns is a tuple, told apart by its length.
KEPT_AS_IS = 2  # tensor, its version counter or UNKNOWN
KEPT_BY_OTHERS = 3  # unpack of the hooks below ours, what their pack returned, None
KEPT_BY_UNIT = 4  # alias, version of the parameter, unit, index of the parameter
UNKNOWN = -1


class SavedTensors:
    """Packs and unpacks for one model."""

    def __init__(self, state: Wrapped, pins: Pins) -> None:
        self._state = state
        self._pins = pins
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
        state = self._state
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse and symbolic tensors have none, and are not ours
            return (tensor, UNKNOWN)
        if state.low <= address < state.high:
            index = state.find(address)
            if index >= 0:
                kept = state.aliases[index] if tensor is state.params[index] else tensor
                return (kept, state.written[index], state.unit_of[index], index)
        return (tensor, tensor._version)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Called when a node wants a saved tensor back, or when Python code reads it."""
        if len(packed) == KEPT_BY_OTHERS:
            return cast(torch.Tensor, packed[0](packed[1]))
        if len(packed) == KEPT_AS_IS:
            tensor, version = packed
            if version != UNKNOWN and tensor._version != version:
                raise _changed(tuple(tensor.shape), "it was changed in place")
            return cast(torch.Tensor, tensor)
        tensor, version, unit, index = packed
        if self._state.written[index] != version:
            raise _changed(self._state.names[index], "it was updated by step() or in place")
        self._pins.pin(unit)
        if torch.is_grad_enabled() and _graph_task() != -1:
            self.push()  # create_graph: the node saves tensors too. Autograd pops it with the node
        return cast(torch.Tensor, tensor)

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
        packed = self.ours.pack(tensor)
        if len(packed) == KEPT_BY_UNIT:
            return packed
        return (self.outer_unpack, self.outer_pack(tensor), None)


def _changed(what: object, how: str) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified: {what}: {how} "
        "between forward and backward"
    )
