"""All the hooks that strata gives to torch, and when torch calls each.

    forward    ModuleHook.before    ahead of a unit's module: the unit enters, its parameters become
                                    plain ones, `pack` and `unpack` are put in place
               Hooks.pack           for every tensor that autograd saves meanwhile
               ModuleHook.after     behind the module, also when it raised: the unit leaves
    backward   Hooks.unpack         when an autograd node wants a saved tensor back: the unit enters
               LandHook             when the gradient of a parameter is complete
               Hooks.end_backward   when the whole backward is over

Note [Pins in backward]. A node uses what it unpacked until the next node runs. So unpack() pins
the unit for the node now running, and releases what earlier nodes pinned once another unit is asked
for. The last pins go at the end of the backward; those of a backward that raised, at the next
forward, step() or zero_grad().

Note [Checkpoint]. torch.utils.checkpoint drops what its own pack hook is given and computes it
again inside backward. Our pack stands above it and keeps parameters from it (they need no
recomputing), in both runs alike. Where a parameter is used outside its module the order of the
hooks may differ between the two runs, so there checkpoint gets the parameter, and the unit stays
entered until its gradients have landed or the backward is over.
"""

import threading
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable

from .paged import PagedParameter
from .wrapped import DTYPE_NAMES, DisableTorchFunction, Unit, Wrapped

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_grad: Any = torch.Tensor.grad

# What pack() returns is a tuple, told apart by its length.
KEPT_AS_IS = 2  # tensor, its version counter
KEPT_BY_OTHERS = 3  # unpack of the hooks below ours, what their pack returned, None
KEPT_BY_UNIT = 4  # alias, version of the parameter, unit, index of the parameter


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the model: nothing."""


class _Uncopied:
    """A hook that turns inert when the model is copied or pickled."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Nothing of strata is left in a copy."""
        return inert

    def __reduce__(self) -> Any:
        """Nothing of strata is left in a pickle."""
        return (_make_inert, ())


def _make_inert() -> Any:
    return inert


class Hooks:
    """The hooks of one wrapped model, and what is entered on their account.

    Use from the thread that trains; autograd's threads call pack, unpack and LandHook, under the
    GIL.
    """

    def __init__(self, state: Wrapped) -> None:
        self.state = state
        self.frames: list[tuple[ModuleHook, bool]] = []  # modules now running; hooks pushed or not
        self.pins: list[_Pin] = []
        self.held: list[Unit] = []  # until their gradients have landed. Note [Checkpoint]
        self.tasks: set[int] = set()  # backwards whose end we are told of
        # Bound once: the same objects are recognised when they lie on top of torch's stack.
        self.pack_hook = self.pack
        self.unpack_hook = self.unpack
        self._handles: list[Any] = []

    def install(self, hooked: dict[nn.Module, list[int]]) -> None:
        """Registers everything. `hooked`: the units that each module's forward reads."""
        state = self.state
        for module, units in hooked.items():
            hook = ModuleHook(self, module, [state.units[u] for u in units])
            self._handles += [
                module.register_forward_pre_hook(Before(hook), prepend=True),
                module.register_forward_hook(After(hook), always_call=True),
            ]
        self._handles.append(state.model.register_forward_pre_hook(RootHook(self), prepend=True))
        for i, (parameter, spec) in enumerate(
            zip(state.params, state.config["params"], strict=True)
        ):
            if parameter.requires_grad:
                land = LandHook(self, i) if spec["trainable"] else drop_grad
                self._handles.append(parameter.register_post_accumulate_grad_hook(land))

    def remove(self) -> None:
        """Takes every hook away again."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Drops what a forward or backward that raised has left behind.

        Inside a backward nothing is stale: a forward there is a recomputation.
        """
        if _graph_task() != -1:
            return
        while self.frames:
            self.close_frame(*self.frames.pop())
        while self._on_top():
            _pop_hooks()
        if self.pins or self.held or self.tasks:
            self._release(list(self.pins))
            self._release_held(list(self.held))
            self.tasks.clear()
            self._forget_landings()

    def in_step(self) -> bool:
        """Whether a module of the model, or a backward, is running now."""
        return bool(self.frames) or _graph_task() != -1

    def close_frame(self, hook: "ModuleHook", pushed: bool) -> None:
        """Undoes what ModuleHook.before did."""
        if pushed and self._on_top():
            _pop_hooks()
        hook.leave()

    # Saved tensors ------------------------------------------------------------------------------

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
        return owner is self or (type(owner) is _Above and owner.hooks is self)

    def _on_top(self) -> bool:
        top = _top_hooks(True)
        return top is not None and self._is_ours(top[0])

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called for each tensor that autograd saves. Parameters are kept by unit, not by value."""
        state = self.state
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse and symbolic tensors have none, and are not ours
            return (tensor, 0)
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
            if version and tensor._version != version:
                raise _changed(tuple(tensor.shape), "it was changed in place")
            return cast(torch.Tensor, tensor)
        tensor, version, unit, index = packed
        if self.state.written[index] != version:
            raise _changed(self.state.names[index], "it was updated by step() or in place")
        self._pin(unit)
        if torch.is_grad_enabled() and _graph_task() != -1:
            self.push()  # create_graph: the node saves tensors too. Autograd pops it with the node
        return cast(torch.Tensor, tensor)

    def _pin(self, unit: Unit) -> None:
        pin = _Pin(unit, _current_node(), _graph_task(), threading.get_ident())
        pins = self.pins
        known = any(p.unit is unit and p.task == pin.task for p in pins)
        if len(pins) > known:
            self._release([p for p in pins if p.is_past(pin) and p.unit is not unit])
        if known:
            place = next(i for i, p in enumerate(pins) if p.unit is unit and p.task == pin.task)
            pins[place] = pin
            return
        self.state.enter(unit, backward=True)
        pins.append(pin)
        self.watch()

    def _release(self, pins: list["_Pin"]) -> None:
        for pin in pins:
            self.pins.remove(pin)
            self.state.leave(pin.unit)

    def _release_held(self, units: list[Unit]) -> None:
        for unit in units:
            self.held.remove(unit)
            self.state.leave(unit)

    def push_outside(self, unit: Unit) -> bool:
        """For an operation on a parameter outside its module. Returns whether hooks were pushed."""
        top = _top_hooks(True)
        if top is None or getattr(top[0], "__module__", "") != "torch.utils.checkpoint":
            return self.push()
        if _graph_task() != -1 and unit not in self.held:  # see Note [Checkpoint]
            self.state.enter(unit, backward=True)
            self.held.append(unit)
            self.watch()
        return False

    @staticmethod
    def pop() -> None:
        """Undoes one push that returned True."""
        _pop_hooks()

    # Backward -----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Asks to be told of the end of the backward now running, once."""
        task = _graph_task()
        if task != -1 and task not in self.tasks:
            self.tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: self.end_backward(task))

    def end_backward(self, task: int) -> None:
        """Called by autograd when the backward has run all its nodes."""
        self.tasks.discard(task)
        self._release([pin for pin in self.pins if pin.task == task])
        if not self.tasks:
            self._release_held(list(self.held))
            self._forget_landings()

    def land(self, unit: Unit) -> None:
        """Notes that one gradient of the unit is complete."""
        self.watch()
        unit.landed += 1
        if unit.landed == unit.trainable:
            self._release([pin for pin in self.pins if pin.unit is unit])
            if unit in self.held:
                self._release_held([unit])

    def _forget_landings(self) -> None:
        for unit in self.state.units:
            unit.landed = 0


class _Pin:
    """A unit that stays entered because autograd node `node` unpacked one of its parameters."""

    __slots__ = ("node", "task", "thread", "unit")

    def __init__(self, unit: Unit, node: Any, task: int, thread: int) -> None:
        self.unit = unit
        self.node = node
        self.task = task
        self.thread = thread

    def is_past(self, now: "_Pin") -> bool:
        """Whether another node of the same backward runs now, so that this one's is done."""
        return self.task == now.task and self.thread == now.thread and self.node is not now.node


class _Above:
    """Our hooks above somebody else's, which still get every tensor that is not a parameter."""

    __slots__ = ("hooks", "outer_pack", "outer_unpack")

    def __init__(self, hooks: Hooks, outer_pack: Any, outer_unpack: Any) -> None:
        self.hooks = hooks
        self.outer_pack = outer_pack
        self.outer_unpack = outer_unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        """As Hooks.pack, which see."""
        packed = self.hooks.pack(tensor)
        if len(packed) == KEPT_BY_UNIT:
            return packed
        return (self.outer_unpack, self.outer_pack(tensor), None)


class ModuleHook:
    """Enters the units that a module's forward reads, and leaves them behind it."""

    __slots__ = ("hooks", "owned", "units")

    def __init__(self, hooks: Hooks, module: nn.Module, units: list[Unit]) -> None:
        self.hooks = hooks
        self.units = units
        index_of = {id(p): i for i, p in enumerate(hooks.state.params)}
        mine = {i for unit in units for i in unit.params}
        # Where each parameter is looked up at run time: one that was exchanged must not pass.
        self.owned = [
            (
                m._parameters,
                name,
                p,
                index_of[id(p)],
                hooks.state.aliases[index_of[id(p)]].data_ptr(),
            )
            for m in module.modules()
            for name, p in m._parameters.items()
            if p is not None and index_of[id(p)] in mine
        ]

    def before(self) -> None:
        """Enters."""
        hooks = self.hooks
        state = hooks.state
        entered = 0
        recorded = torch.is_grad_enabled() or state.model.training
        try:
            for unit in self.units:
                state.enter(unit, False, recorded)
                entered += 1
        except BaseException:
            for unit in self.units[:entered]:
                state.leave(unit)
            raise
        params = state.params
        for unit in self.units:
            unit.running += 1
            if unit.running == 1:
                for i in unit.params:
                    params[i].__class__ = nn.Parameter
        try:
            self._check()
        except BaseException:
            self.leave()
            raise
        hooks.frames.append((self, hooks.push()))

    def after(self, output: Any) -> Any:
        """Leaves. Returns what is to take the place of the output, or None."""
        frames = self.hooks.frames
        if not any(frame[0] is self for frame in frames):
            return None  # before() itself raised
        # Frames above ours belong to modules that a KeyboardInterrupt left without a word.
        while frames[-1][0] is not self:
            self.hooks.close_frame(*frames.pop())
        replaced = self._own(output)
        self.hooks.close_frame(*frames.pop())
        return None if replaced is output else replaced

    def leave(self) -> None:
        """Leaves the units; their parameters are paged ones again."""
        state = self.hooks.state
        params = state.params
        for unit in reversed(self.units):
            unit.running -= 1
            if unit.running == 0:
                state.note_writes(unit.params)
                for i in unit.params:
                    params[i].__class__ = PagedParameter
            state.leave(unit)

    def _check(self) -> None:
        frozen = self.hooks.state.frozen
        for parameters, name, parameter, index, address in self.owned:
            if (
                parameters.get(name) is not parameter
                or parameter.data_ptr() != address
                or (index in frozen and parameter.requires_grad)
            ):
                full_name = self.hooks.state.names[index]
                raise RuntimeError(
                    f"parameter {full_name!r} was exchanged, or unfrozen, after strata.wrap(): "
                    "change values in place (p.copy_(...)), or call strata.unwrap(model) first"
                )

    def _own(self, output: Any) -> Any:
        """The module's output, with views of its parameters replaced by copies that may leave."""
        if type(output) is torch.Tensor:
            state = self.hooks.state
            if output.layout is torch.strided and state.find(output.data_ptr()) >= 0:
                return output.clone()
            return output
        if isinstance(output, dict):
            for key, value in output.items():
                owned = self._own(value)
                if owned is not value:
                    output[key] = owned
            return output
        if type(output) is tuple or type(output) is list:
            items = [self._own(item) for item in output]
            if any(a is not b for a, b in zip(items, output, strict=True)):
                return type(output)(items)
        return output


class Before(_Uncopied):
    """ModuleHook.before, as torch keeps it."""

    __slots__ = ("hook",)

    def __init__(self, hook: ModuleHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Called by torch ahead of the module's forward."""
        self.hook.before()


class After(_Uncopied):
    """ModuleHook.after, as torch keeps it."""

    __slots__ = ("hook",)

    def __init__(self, hook: ModuleHook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called by torch behind the module's forward, also when that raised an Exception."""
        return self.hook.after(output)


class RootHook(_Uncopied):
    """Starts a forward of the whole model from a clean state."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Called by torch ahead of the model's forward."""
        self.hooks.reset()


class LandHook(_Uncopied):
    """Takes the gradient of one parameter to the core."""

    __slots__ = ("accumulate", "dtype_name", "hooks", "index", "unit")

    def __init__(self, hooks: Hooks, index: int) -> None:
        self.hooks = hooks
        self.index = index
        self.unit = hooks.state.unit_of[index]
        self.accumulate = hooks.state.config["accumulate"]
        self.dtype_name = hooks.state.config["params"][index]["dtype"]

    def __call__(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient is complete, once per backward."""
        state, index = self.hooks.state, self.index
        grad = take_grad(parameter)
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {state.names[index]!r} is sparse, which strata does not support: "
                "build the embedding with sparse=False"
            )
        if state.dirty:
            raise RuntimeError(
                "backward() after step() without zero_grad(): plain PyTorch would add to the old "
                "gradients, which strata has already used up; call optimizer.zero_grad()"
            )
        if state.landed[index] and not self.accumulate:
            raise RuntimeError(
                f"a second gradient of {state.names[index]!r} before step(): pass "
                "accumulation_steps=N to strata.wrap() for several backward calls per step"
            )
        grad = grad.detach().contiguous()
        if DTYPE_NAMES.get(grad.dtype) != self.dtype_name:
            grad = grad.to(parameter.dtype)
        state.session.land_gradient(index, grad.data_ptr(), self.dtype_name)
        state.landed[index] += 1
        self.hooks.land(self.unit)


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Removes and returns what autograd left in the real `grad` of a parameter."""
    with DisableTorchFunction():
        grad: torch.Tensor | None = _grad.__get__(parameter)
        _grad.__set__(parameter, None)
    return grad


def drop_grad(parameter: torch.Tensor) -> None:
    """Called by autograd for a parameter that no optimizer group holds: nobody will ask for it."""
    take_grad(parameter)


def _changed(what: object, how: str) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified: {what}: {how} "
        "between forward and backward"
    )
