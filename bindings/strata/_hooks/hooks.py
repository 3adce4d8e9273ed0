"""All the hooks that strata gives to torch, and when torch calls each.

forward    Hooks.before_model   ahead of the whole model
           Hooks.after_model    after it
           ModuleHook.before    ahead of a unit's module: the unit enters, its parameters become
                                plain ones, `pack` and `unpack` are put in place. Not where all of
                                them were exchanged (exchanged.py)
           PlannedForward       in the place of the module's forward (forwards.py)
           SavedTensors.pack    for every tensor that autograd saves meanwhile
           ModuleHook.after     behind the module, also when it raised: the unit leaves
backward   SavedTensors.unpack  when an autograd node wants a saved tensor back: the unit enters
                                (pins.py keeps it there)
           Hold                 ahead of the nodes of a unit whose memory somebody keeps (pins.py)
           LandHook             when the gradient of a parameter is complete
           Pins.end             when the whole backward is over
state      Hooks.start_clean    ahead of a module's state_dict() and load_state_dict()
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .._activations.arguments import tensors_in
from .._activations.forwards import PlannedForward, plan_forwards
from .._activations.inputs import Inputs, storage_of
from .._activations.swapping import Swapping
from .._runtime.real_grads import drop_real
from .._runtime.streams import graphs_in_use, refuse_capture
from .._runtime.unit import Unit
from .._runtime.visits import StepCall, Visit
from .._runtime.wrapped import Wrapped
from .._torch_compat import DisableTorchFunction, graph_task, untraced
from .adapters import refuse_new_adapters
from .exchanged import Owned, is_exchanged
from .frames import Frame, Frames
from .land_hook import LandHook, Uncopied
from .parallel import KeptUnwrapped, refuse_ddp_around, several_processes
from .pins import Pins, hold, references
from .saved import SavedTensors


class Hooks:
    """The hooks of one wrapped model, and what is entered on their account.

    Use from the thread that trains; autograd's threads call pack, unpack and LandHook, under the
    GIL.
    """

    def __init__(self, state: Wrapped) -> None:
        self.state = state
        self.frames = Frames(state)
        self.swapping = Swapping(state)
        self.pins = Pins(state, self.swapping)
        self.saved = SavedTensors(state, self.pins, self.swapping, self.frames)
        self._handles: list[Any] = []
        self._module_hooks: list[ModuleHook] = []
        self._land_hooks: dict[int, LandHook] = {}
        self.planned: list[PlannedForward] = []  # forwards that plans may change
        self._of_several = False  # processes of torch.distributed
        self.inputs = Inputs()  # of the unit computed again whose forward ran last
        self.given: set[int] = set()  # storages that the model was called with

    def install(self, hooked: dict[nn.Module, list[int]]) -> None:
        """Registers everything. `hooked`: the units that each module's forward reads."""
        state = self.state
        by_module = {
            module: ModuleHook(self, module, [state.units[u] for u in units])
            for module, units in hooked.items()
        }
        self._module_hooks = list(by_module.values())
        for module, hook in by_module.items():
            self.pins.note_reader(hook.unit, hook.indices)
            self._handles += [
                module.register_forward_pre_hook(Hook(hook.before_forward), prepend=True),
                module.register_forward_hook(Hook(hook.after_forward), always_call=True),
            ]
        root = state.model.register_forward_pre_hook(
            Hook(self.before_model), prepend=True, with_kwargs=True
        )
        self._handles += [
            root,
            state.model.register_forward_hook(Hook(self.after_model), always_call=True),
        ]
        if (adapters := refuse_new_adapters(state.model)) is not None:
            self._handles.append(adapters)
        count = state.ranks.all.count if state.ranks is not None else 1
        self._of_several = count > 1 or several_processes()
        if self._of_several:
            self._handles.append(KeptUnwrapped(state.model, count, state.shards is not None))
        self.planned = plan_forwards(self, by_module)
        self._handles += self.planned
        for i, (parameter, spec) in enumerate(
            zip(state.params, state.config["params"], strict=True)
        ):
            if parameter.requires_grad and not state.gradients.is_own(i):
                # Of ranks that of one that no optimizer group holds: nobody adds it up.
                land: Any = drop_real
                if spec["trainable"]:
                    land = self._land_hooks[i] = LandHook(self, i)
                self._handles.append(parameter.register_post_accumulate_grad_hook(land))
        for module in state.model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(
                    Hook(partial(self.start_clean, "state_dict()"))
                ),
                module.register_load_state_dict_pre_hook(Hook(self.start_load)),
            ]

    def remove(self) -> None:
        """Takes every hook away again."""
        self.reset()
        self.swapping.drain()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def land(self, index: int) -> None:
        """Takes the gradient that autograd has just completed, ahead of its hook."""
        self._land_hooks[index](self.state.params[index])

    def reset(self) -> None:
        """Drops what an exception has left behind, wherever it came: see visits.py. Call it ahead
        of whatever needs a clean state. What other threads are in the middle of stays.

        Inside a backward nothing is stale: a forward there is a recomputation.
        """
        if graph_task() != -1:
            return
        state = self.state
        bound, live = state.visits.sort_out()
        dead = [f for f in self.frames.all() if f.number < bound and f.number not in live]
        self.frames.make_paged(dead)
        left = state.session.leave_all_but(live, bound, stream=state.stream())
        self.saved.reset()
        visits, tasks = state.visits.over(bound, live)
        if left or visits or tasks:
            for frame in dead:
                self.frames.drop(frame)
            self.pins.reset(live)
            self.swapping.reset(backward_over=not state.visits.in_backward)
            others = state.visits.among(live)
            self._drop_record(visits, others)
            if self._learn_outcome(visits, tasks, others):
                state.visits.forget(visits, tasks)
            for unit in state.units:
                if not state.session.entered(unit.index):
                    state.views.check(unit)
        self.swapping.poll()

    def _drop_record(self, over: list[Visit], others: list[Visit]) -> None:
        """Forgets what was recorded of a step that was given up, unless another thread goes on."""
        recorder, session = self.state.recorder, self.state.session
        given_up = not over or any(visit.recorded for visit in over)
        if given_up and not any(visit.recorded for visit in others):
            recorder.abandon()
            return
        for unit in self.state.units:
            recorder.correct(unit.index, session.entered(unit.index))

    def _learn_outcome(self, over: list[Visit], tasks: list[int], others: list[Visit]) -> bool:
        """Gradients, and the count of steps, are one for all threads: only a backward or a step()
        that was given up leaves them in doubt. False: another thread is at them, so later."""
        if tasks or any(visit.task != -1 or isinstance(visit, StepCall) for visit in over):
            if self.state.visits.in_backward or any(isinstance(v, StepCall) for v in others):
                return False
            self.state.steps.learn_outcome()
        return True

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Called by torch ahead of the model's forward: it starts from a clean state, under the
        plan for its batch."""
        state = self.state
        if self._is_stateless():
            return
        refuse_capture(state.device, "the model")
        if self._of_several:
            refuse_ddp_around(state.model)
        self.reset()
        if graph_task() == -1:
            self.let_land()
            state.refuse_half_step("a forward")
            if not torch.is_grad_enabled():
                state.catch_up()
        planning = state.planning
        if planning is not None and graph_task() == -1:
            self.given = {key for t in tensors_in((args, kwargs)) if (key := storage_of(t))}
            planning.begin_forward(args, kwargs)

    def after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called by torch after the model's forward, also when that raised an Exception: then the
        step is not recorded any more, for nobody knows whether another one follows."""
        self.inputs.look()
        if output is None and sys.exc_info()[1] is not None and graph_task() == -1:
            self.state.recorder.abandon()
        self.state.recorder.await_backward(tensors_in(output))

    def _is_stateless(self) -> bool:
        """Whether torch.func.functional_call has exchanged all parameters."""
        return all(hook.count_exchanged() == len(hook.owned) for hook in self._module_hooks)

    def start_clean(self, what: str, *_: Any) -> None:
        """Called by torch for every module in turn, ahead of its state_dict() or load_state_dict().
        `what`: which of them."""
        if not self.frames.in_step():
            self.reset()
            self.state.refuse_half_step(what)

    def start_load(
        self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Called by torch for every module in turn, ahead of its load_state_dict()."""
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would exchange the parameters, which strata.wrap() "
                "has moved to pages: call it without assign=, which copies the values"
            )
        self.start_clean("load_state_dict()")

    def let_land(self) -> None:
        """Ahead of a forward: see Note [Memory of graphs] in streams.py."""
        if graphs_in_use():
            self.state.landings.wait()

    def close(self, frame: Frame) -> None:
        """Undoes what ModuleHook.before did, however far that came."""
        self.saved.pop_to(frame.pushed)
        self.frames.make_paged([frame])
        for unit in reversed(frame.hook.units):
            self.state.leave(unit, frame)
        self.frames.drop(frame)
        self.state.visits.end(frame)


class ModuleHook:
    """Enters the units that a module's forward reads, and leaves them behind it."""

    __slots__ = ("hooks", "indices", "owned", "params", "unit", "units")

    def __init__(self, hooks: Hooks, module: nn.Module, units: list[Unit]) -> None:
        self.hooks = hooks
        # Its own is entered last: what the module computes, and the time it takes, is noted there.
        self.units = sorted(units, key=lambda unit: unit.index)
        self.unit = self.units[-1]
        index_of = {id(p): i for i, p in enumerate(hooks.state.params)}
        mine = {i for unit in units for i in unit.params}
        # Where each parameter is looked up at run time.
        self.owned = [
            Owned(m, name, p, index_of[id(p)], hooks.state.aliases[index_of[id(p)]].data_ptr())
            for m in module.modules()
            for name, p in m._parameters.items()
            if p is not None and index_of[id(p)] in mine
        ]
        self.indices = sorted({owned.index for owned in self.owned})
        self.params = [hooks.state.params[i] for i in self.indices]

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Called by torch ahead of the module's forward; in a backward by a user's checkpoint."""
        self.before(graph_task() != -1)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called by torch behind the module's forward, also when that raised an Exception."""
        return self.after(output)

    def before(self, backward: bool) -> None:
        """Enters. `backward`: the forward is run again there, for its activations."""
        hooks = self.hooks
        state = hooks.state
        if self.count_exchanged() == len(self.owned):
            return  # no page is needed
        refuse_capture(state.device, self.unit.name)
        hooks.inputs.look()
        if not backward and not hooks.frames.mine():
            hooks.let_land()
            state.refuse_half_step("a forward")
        if backward:
            hooks.pins.run_again(self.unit)
        hooks.swapping.open(self.unit)
        recorded = torch.is_grad_enabled() or state.model.training
        frame = hooks.frames.begin(self, hooks.saved.pushed())
        frame.recorded = recorded
        try:
            for unit in self.units:
                state.enter(unit, frame, backward, recorded)
            if backward:
                for index in self.indices:
                    state.check_old(index)
            hooks.frames.make_plain(frame)
            if state.shards is not None:
                state.shards.show(i for unit in self.units for i in unit.params)
            frame.kept = references(self.params)
            hooks.saved.push()
        except BaseException:
            hooks.close(frame)
            raise

    def after(self, output: Any) -> Any:
        """Leaves. Returns what is to take the place of the output, or None."""
        frames = self.hooks.frames.mine()
        if not any(frame.hook is self for frame in frames):
            return None  # before() itself raised, or entered nothing
        # Frames above ours belong to modules that a KeyboardInterrupt left without a word.
        while frames[-1].hook is not self:
            self.hooks.close(frames[-1])
        frame, views = frames[-1], self.hooks.state.views
        try:
            replaced = views.copied_out(output)
            keeps, found = references(self.params) > frame.kept, views.found
        finally:
            self.hooks.close(frame)
        makes_graph = torch.is_grad_enabled() and graph_task() == -1
        if makes_graph and (keeps or views.found > found):
            hold(replaced, self.hooks.pins, self.units)
        self.hooks.swapping.poll()
        return None if replaced is output else replaced

    def count_exchanged(self) -> int:
        """In the place of how many parameters the forward finds other tensors. See exchanged.py."""
        state = self.hooks.state
        with DisableTorchFunction():
            return sum(is_exchanged(state, owned) for owned in self.owned)


@dataclass(slots=True, eq=False)
class Hook(Uncopied):
    """A method of ModuleHook or Hooks, as torch keeps it."""

    method: Callable[..., Any]

    @untraced
    def __call__(self, *args: Any) -> Any:
        """Called by torch."""
        return self.method(*args)
