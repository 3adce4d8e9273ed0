"""All the hooks that strata gives to torch, and when torch calls each.

forward    ModuleHook.before    ahead of a unit's module: the unit enters, its parameters become
                                plain ones, `pack` and `unpack` are put in place
           PlannedForward       in the place of the module's forward (forwards.py)
           SavedTensors.pack    for every tensor that autograd saves meanwhile
           ModuleHook.after     behind the module, also when it raised: the unit leaves
backward   SavedTensors.unpack  when an autograd node wants a saved tensor back: the unit enters
                                (pins.py keeps it there)
           LandHook             when the gradient of a parameter is complete
           Pins.end             when the whole backward is over
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from .forwards import plan_forwards, untraced
from .graphs import graphs_in_use, owned_by_graph, refuse_capture
from .paged import PagedParameter
from .pins import Pins
from .saved import SavedTensors
from .swapping import Swapping
from .wrapped import DTYPE_NAMES, DisableTorchFunction, Unit, Wrapped

_graph_task = torch._C._current_graph_task_id
_grad: Any = torch.Tensor.grad


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
        self.swapping = Swapping(state)
        self.pins = Pins(state, self.swapping)
        self.saved = SavedTensors(state, self.pins, self.swapping, self.frames)
        self._handles: list[Any] = []

    def install(self, hooked: dict[nn.Module, list[int]]) -> None:
        """Registers everything. `hooked`: the units that each module's forward reads."""
        state = self.state
        by_module = {
            module: ModuleHook(self, module, [state.units[u] for u in units])
            for module, units in hooked.items()
        }
        for module, hook in by_module.items():
            self._handles += [
                module.register_forward_pre_hook(Before(hook), prepend=True),
                module.register_forward_hook(After(hook), always_call=True),
            ]
        root = state.model.register_forward_pre_hook(RootHook(self), prepend=True, with_kwargs=True)
        self._handles.append(root)
        self._handles += plan_forwards(self, by_module)
        for i, (parameter, spec) in enumerate(
            zip(state.params, state.config["params"], strict=True)
        ):
            if parameter.requires_grad:
                land = LandHook(self, i) if spec["trainable"] else drop_grad
                self._handles.append(parameter.register_post_accumulate_grad_hook(land))

    def remove(self) -> None:
        """Takes every hook away again."""
        self.reset()
        self.swapping.drain()
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
        while self.saved.on_top():
            self.saved.pop()
        self.pins.reset()
        self.swapping.poll()

    def let_land(self) -> None:
        """Ahead of a forward: see Note [Memory of graphs] in graphs.py."""
        if graphs_in_use():
            self.state.landings.wait()

    def in_step(self) -> bool:
        """Whether a module of the model, or a backward, is running now."""
        return bool(self.frames) or _graph_task() != -1

    def close_frame(self, hook: "ModuleHook", pushed: bool) -> None:
        """Undoes what ModuleHook.before did."""
        if pushed and self.saved.on_top():
            self.saved.pop()
        hook.leave()


class ModuleHook:
    """Enters the units that a module's forward reads, and leaves them behind it."""

    __slots__ = ("hooks", "owned", "unit", "units")

    def __init__(self, hooks: Hooks, module: nn.Module, units: list[Unit]) -> None:
        self.hooks = hooks
        self.units = units
        self.unit = max(units, key=lambda unit: unit.index)  # its own: others are tied to it
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

    def before(self, backward: bool = False) -> None:
        """Enters. `backward`: the forward is run again there, for its activations."""
        hooks = self.hooks
        state = hooks.state
        refuse_capture(state.device, self.unit.name)
        if not backward and not hooks.frames:
            hooks.let_land()
        hooks.swapping.open(self.unit)
        entered = 0
        recorded = torch.is_grad_enabled() or state.model.training
        try:
            for unit in self.units:
                state.enter(unit, backward, recorded)
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
        hooks.frames.append((self, hooks.saved.push()))

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
        self.hooks.swapping.poll()
        return None if replaced is output else replaced

    def leave(self) -> None:
        """Leaves the units; their parameters are paged ones again."""
        state = self.hooks.state
        params = state.params
        for unit in reversed(self.units):
            unit.running -= 1
            if unit.running == 0:
                for i in unit.params:
                    parameter = params[i]
                    if parameter._version != state.written[i]:
                        state.note_write(i)
                    parameter.__class__ = PagedParameter
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

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Called by torch ahead of the module's forward; in a backward by a user's checkpoint."""
        self.hook.before(_graph_task() != -1)


class After(_Uncopied):
    """ModuleHook.after, as torch keeps it."""

    __slots__ = ("hook",)

    def __init__(self, hook: ModuleHook) -> None:
        self.hook = hook

    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called by torch behind the module's forward, also when that raised an Exception."""
        return self.hook.after(output)


class RootHook(_Uncopied):
    """Starts a forward of the whole model from a clean state, under the plan for its batch."""

    __slots__ = ("hooks",)

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called by torch ahead of the model's forward."""
        state = self.hooks.state
        refuse_capture(state.device, "the model")
        self.hooks.reset()
        if _graph_task() == -1:
            self.hooks.let_land()
            if state.groups_used is not None:
                raise RuntimeError(
                    "a forward between backward() and step(): update='in_backward' has updated "
                    "parameters already; call optimizer.step() behind every backward()"
                )
            if not torch.is_grad_enabled():
                state.catch_up()
        planning = state.planning
        if planning is not None and _graph_task() == -1:
            planning.begin_forward(args, kwargs)


class LandHook(_Uncopied):
    """Takes the gradient of one parameter to the core.

    Refers weakly: Python's garbage collector does not look into this kind of hook, so the cycle of
    model, parameter and hook would never be found.
    """

    __slots__ = ("accumulate", "dtype_name", "hooks", "in_backward", "index", "unit")

    def __init__(self, hooks: Hooks, index: int) -> None:
        self.hooks = weakref.ref(hooks)
        self.index = index
        self.unit = hooks.state.unit_of[index]
        self.accumulate = hooks.state.config["accumulate"]
        self.in_backward = hooks.state.config["update"] == "in_backward"
        self.dtype_name = hooks.state.config["params"][index]["dtype"]

    def __call__(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient is complete, once per backward."""
        hooks, index = self.hooks(), self.index
        grad = take_grad(parameter)
        if hooks is None or grad is None:
            return
        state = hooks.state
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
            why = (
                "update='in_backward' has used the first one already; wrap with update='on_step' "
                "and accumulation_steps=N"
                if self.in_backward
                else "pass accumulation_steps=N to strata.wrap()"
            )
            raise RuntimeError(
                f"a second gradient of {state.names[index]!r} before step(): {why} for several "
                "backward calls per step"
            )
        grad = grad.detach().contiguous()
        if DTYPE_NAMES.get(grad.dtype) != self.dtype_name:
            grad = grad.to(parameter.dtype)
        if owned_by_graph(grad):
            grad = grad.clone()  # see Note [Memory of graphs] in graphs.py
        begin = state.recorder.now()
        state.landings.put(partial(self._land, hooks, grad))
        state.recorder.pause(begin, state.recorder.now())
        state.landed[index] += 1
        hooks.pins.land(self.unit)

    def _land(self, hooks: Hooks, grad: torch.Tensor, stream: int) -> None:
        """In its turn among the landings of the model."""
        session = hooks.state.session
        if self.in_backward and not session.gradient_fits(self.index):
            hooks.pins.make_way(self.unit)
        session.land_gradient(self.index, grad.data_ptr(), self.dtype_name, stream=stream)


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Removes and returns what autograd left in the real `grad` of a parameter."""
    with DisableTorchFunction():
        grad: torch.Tensor | None = _grad.__get__(parameter)
        _grad.__set__(parameter, None)
    return grad


def drop_grad(parameter: torch.Tensor) -> None:
    """Called by autograd for a parameter that no optimizer group holds: nobody will ask for it."""
    take_grad(parameter)
