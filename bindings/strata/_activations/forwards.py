"""Runs the forward of a unit as the plan says: as it is, recomputed in backward, or on slices.

    planned = plan_forwards(hooks, by_module)            # in the place of each module.forward
    unit.activation, unit.slices = "recompute", 4        # obeyed from the next forward on
    planned[0].remove()

The object stands in the instance's own `forward`; class and torch are left alone, and a copy or a
pickle of the module has its plain forward. Use from the thread that trains; recomputations come
from autograd's threads, under the GIL.

Note [Recomputation]. It is torch.utils.checkpoint's, non-reentrant, which keeps random numbers and
autocast as they were. Our saved-tensor hooks lie above its own in both runs, so parameters are kept
by unit (saved.py). All tensors go through checkpoint as positional arguments, so that the hooks
below see each of them as a saved tensor. Attributes, generators of random numbers, buffers, caches,
containers and the context are in the second run as they were before the first, so nothing is
counted twice. A forward that changes a parameter in place is not run again. Where it first does so
after the trial, there is no older value: the second run must leave the parameter as it was.

Note [Proof]. Before a unit is computed again for the first time, in training and in evaluation
mode, a trial shows that a second run gives the same (trial.py). Where it does not, the unit keeps
its activations from then on, or they are swapped, and plans are made anew. What changes an input in
place after the forward (x += block(x)) cannot be seen then. So in these first forwards, and for
good where it was seen, copies of the inputs are what the second run gets; not of what the model
itself was called with.

Note [Compiled units]. torch.compile looks at each Python function as it is called. Ours and
checkpoint's are not for it. So it is switched off ahead of them, and on again for the plain
forward, in both runs alike: they must save the same tensors. So both must run the same graph, and
graphs for any number or shape, of which two may fit, are not made. In a step that is recorded it
stays off, for the planner counts what the plain forward saves. It stays off where CUDA graphs are
captured, too: one that is replayed in the backward writes over what other forwards have left.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from .._config.choices import RECOMPUTES
from .._errors import StrataError
from .._runtime.unit import Unit
from .._torch_compat import (
    captures_graphs,
    compiler,
    graph_task,
    is_stopped_script,
    is_transformed,
    one_graph_each,
    set_compiler,
    top_hooks,
    untraced,
    untraced_itself,
)
from .arguments import Arguments, layers_of, update_cache
from .attributes import Attributes, form_of, owners_of
from .inputs import Before, Buffers, Found, Inputs, Parameters
from .slicing import SliceSums, Verdict, batch_size, cut, fits, merged
from .trial import Verdicts, why_not_again

if TYPE_CHECKING:
    from .._hooks.hooks import Hooks, ModuleHook

log = logging.getLogger("strata")


def plan_forwards(
    hooks: "Hooks", by_module: "dict[nn.Module, ModuleHook]"
) -> list["PlannedForward"]:
    """Takes over the forward of every module that alone reads a unit of its own."""
    root = hooks.state.model
    taken = []
    for module, hook in by_module.items():
        unit = hook.unit
        readers = sum(unit in other.units for other in by_module.values())
        nested = any(inner in by_module for inner in module.modules() if inner is not module)
        if module is not root and readers == 1 and not nested:
            taken.append(PlannedForward(hooks, hook, module, unit))
            # An embedding that renormalises changes its rows in place, in every forward.
            inner_modules = module.modules()
            unit.may_recompute = all(getattr(m, "max_norm", None) is None for m in inner_modules)
    return taken


class PlannedForward:
    """The forward of one module, under the plan of its unit: it takes the place of the module's."""

    def __init__(self, hooks: "Hooks", hook: "ModuleHook", module: nn.Module, unit: Unit) -> None:
        functools.update_wrapper(self, module.forward)  # inspect.signature() sees the plain one
        self.plain: Callable[..., Any] = module.forward
        self.was_own = "forward" in module.__dict__
        self.removed = False
        self.module = module
        self.hooks = hooks
        self.hook = hook
        self.unit = unit
        self.buffers = Buffers(module)
        self.parameters = Parameters(module)
        self._verdicts = Verdicts(module, self.plain)
        self.compiler: Any = None  # of the forward that runs now
        self.inputs = Inputs()
        self._proved: set[Any] = set()  # forms of module and arguments; see Note [Proof]
        self._layers = layers_of(module)
        self._logged_reason = ""
        module.forward = self

    def remove(self) -> None:
        """Gives the module its own forward back; where somebody wrapped ours, ours turns inert."""
        self.removed = True
        own = self.module.__dict__
        if own.get("forward") is self:
            if self.was_own:
                self.module.forward = self.plain
            else:
                del own["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch between the hooks of the module."""
        planned = self.unit.activation in RECOMPUTES or self.hooks.state.recorder.recording
        if self.removed or not planned or self.hook.count_exchanged():
            return self.plain(*args, **kwargs)
        return self._beside_compiler(args, kwargs)

    @untraced_itself
    def _beside_compiler(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Note [Compiled units]."""
        found = compiler()
        stays_off = self.hooks.state.recorder.recording or captures_graphs(found)
        self.compiler = None if stays_off else found
        return self._as_planned(args, kwargs)

    @untraced
    def _as_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit, state = self.unit, self.hooks.state
        if not self._is_training():
            return self.run(self.compiler, args, kwargs)
        arguments = self.arguments(args, kwargs)
        trained = any(read.trainable for read in self.hook.units)
        transformed = any(map(is_transformed, arguments.tensors))  # their values end with the call
        if transformed or not (trained or any(t.requires_grad for t in arguments.tensors)):
            return self.run(self.compiler, args, kwargs)
        if state.recorder.recording:
            state.recorder.inputs(arguments.in_memory)
            if state.planning is not None and state.planning.recording.chooses(unit):
                return state.planning.recording.forward(self, args, kwargs)
        if unit.activation in RECOMPUTES:
            return self.recomputing(arguments, args, kwargs)
        self.verdict(arguments, batch_size(arguments.tensors))
        return self.keeping(args, kwargs)

    def run(self, compiled_by: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The plain forward, compiled by what the caller found; None: as it is."""
        if not compiled_by:
            return self.plain(*args, **kwargs)
        with one_graph_each():
            before = set_compiler(compiled_by)
            try:
                return self.plain(*args, **kwargs)
            finally:
                set_compiler(before)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Of a forward, taken apart."""
        return Arguments((args, kwargs), self._layers)

    def recomputing(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A forward that is computed again in the backward, on slices where the unit has some."""
        batch = batch_size(arguments.tensors)
        verdict = self.verdict(arguments, batch)
        count = min(self.unit.slices, batch)
        cut_ones = verdict.cut if count > 1 and verdict is not None and not verdict.reason else None
        form = form_of(self.module), arguments.form
        if form not in self._proved or not self.unit.may_recompute:
            if cut_ones is None and not self._may_repeat(arguments):  # slices: a verdict is a proof
                return self.keeping(args, kwargs)
            self._proved.add(form)
            self.inputs.copied = True
        if cut_ones is None:
            return self._checkpointed(arguments, (args, kwargs))
        return self._sliced(arguments, (args, kwargs), cut_ones, count)

    def keeping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward as it is."""
        if not self.hooks.state.recorder.recording:
            return self.run(self.compiler, args, kwargs)
        before = self.taken()  # recorded for the planner: may it be computed again?
        output = self.plain(*args, **kwargs)
        self.learn(before)
        return output

    def _may_repeat(self, arguments: Arguments) -> bool:
        """See Note [Proof]."""
        unit, state = self.unit, self.hooks.state
        if not unit.may_recompute:
            return False
        with state.recorder.paused(part_of_step=False):
            reason = why_not_again(self.module, self.plain, arguments)
        if reason and state.planning is not None:
            state.planning.second_runs.refuse(unit, reason)
        return not reason

    def taken(self) -> Before:
        """The parameters ahead of a forward. REQUIRES: the unit is entered."""
        recorder, parameters = self.hooks.state.recorder, self.parameters
        if parameters.known or not recorder.recording:
            return parameters.taken(parameters.rewritten)
        with recorder.paused(part_of_step=False):
            return parameters.taken(parameters.names)

    def learn(self, before: Before) -> list[str]:
        """The parameters that a forward has changed in place since taken(). Notes which of them
        have to be told to the core, and whether the unit may be computed again."""
        state, rewritten = self.hooks.state, self.parameters.learn(before)
        if rewritten:
            self.unit.may_recompute = False
            state.silent.update(state.index_of(self.parameters[n]) for n in before.silent())
        before.keep_only(rewritten)
        return rewritten

    def refuse_twice(self, name: str, why: str) -> None:
        """Raises StrataError: the forward changes a parameter, and would do so more than once."""
        state, unit = self.hooks.state, self.unit
        unit.activation, unit.slices = "keep", 1
        full_name = state.names[state.index_of(self.parameters[name])]
        raise StrataError(
            f"{unit.name} cannot be {why}: its forward changes the parameter {full_name!r} in "
            "place, and would do so more than once. From now on it is not: drop this step by "
            "optimizer.zero_grad() and go on"
        )

    def __getattr__(self, name: str) -> Any:
        """`__self__`, `__func__` and whatever else the plain forward has."""
        return getattr(self.__dict__["plain"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module has a plain forward, bound to the copy."""
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        """A pickled module has a plain forward."""
        return (_same, (self.plain,))

    def _is_training(self) -> bool:
        """Whether a graph is recorded for a backward, and nobody else recomputes this module."""
        if not torch.is_grad_enabled() or graph_task() != -1 or torch.jit.is_tracing():
            return False
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training:
            return False  # Transformers' own, which lies within this forward
        return not _above_checkpoint()

    def verdict(self, arguments: Arguments, batch: int) -> Verdict | None:
        """Whether the batch may be cut; found out when the planner or the plan wants to know."""
        unit, state = self.unit, self.hooks.state
        wanted = state.recorder.recording or unit.slices > 1
        if not wanted or not state.may_split:
            return None
        with state.recorder.paused(part_of_step=False):
            verdict = self._verdicts.find(arguments)
        if verdict is not None:
            self._note(verdict.reason, batch)
        return verdict

    def _note(self, reason: str, batch: int) -> None:
        """Keeps a verdict for the planner, and says once why a unit does not run on slices."""
        unit = self.unit
        unit.unsplit_reason = reason
        unit.slices_max = 1 if reason else batch
        if reason and unit.slices > 1 and reason != self._logged_reason:
            log.info("%s runs on the whole batch: %s", unit.name, reason)
            self._logged_reason = reason

    def _checkpointed(self, arguments: Arguments, own: Any) -> Any:
        recorder, find = self.hooks.state.recorder, self.hooks.state.find
        tensors = self.inputs.kept(arguments.tensors, self.hooks.given, find)
        if tensors is not arguments.tensors and recorder.recording:
            recorder.saved_copies(self.unit.index, tensors, arguments.tensors)
        self.hooks.inputs = self.inputs
        return checkpoint(_Call(self, arguments, own), *tensors, use_reentrant=False)

    def _sliced(self, arguments: Arguments, own: Any, cut_ones: Sequence[bool], count: int) -> Any:
        batch = batch_size(arguments.tensors)
        found = self.buffers.taken()
        before = self.parameters.taken(())
        sums = SliceSums(self.parameters)
        outputs = []
        changed = None
        for piece in cut(arguments.tensors, batch, count):
            nest = arguments.filled(piece)
            part = Arguments(nest, self._layers)
            caches = part.caches
            output = self._checkpointed(part, nest)
            outputs.append(Arguments((output, caches), self._layers))
            sums.watch(outputs[-1].tensors, piece)
            for name in before.changed():
                self._verdicts.refuse(arguments, f"its forward changes the parameter {name!r}")
                self.refuse_twice(name, "run on slices of the batch")
            changed = found.changed()
            if changed is not None:
                break
        if changed is not None or not fits(outputs, cut_ones, batch):
            reason = "its output has another form than when slices were tried"
            if changed is not None:
                found.put_back()
                reason = f"its forward changes the buffer {changed!r}"
            self._note(reason, batch)
            self._verdicts.refuse(arguments, self.unit.unsplit_reason)
            return self._checkpointed(arguments, own)
        result, caches = merged(outputs, cut_ones)
        sums.begin_at(Arguments((result, caches)).tensors)
        for cache, newer in zip(arguments.caches, caches, strict=True):
            update_cache(cache, newer)
        return result


class _Call:
    """One forward under checkpoint, and its recomputations. See Note [Recomputation]."""

    def __init__(self, planned: PlannedForward, arguments: Arguments, own: Any) -> None:
        self._planned = planned
        self._arguments = arguments
        self._own = own  # what the first run is called with: the caller's very objects
        self._compiler = planned.compiler  # of both runs
        self._found: Found
        self._attributes: Attributes
        self._rewritten: list[str] = []  # parameters that the first run changed in place
        arguments.forget()  # checkpoint keeps the tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Called by checkpoint in forward, and in backward when a node wants a saved tensor."""
        own, self._own = self._own, None
        return self._again(tensors) if own is None else self._first(*own)

    def _first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        planned = self._planned
        saved = planned.hooks.saved
        pushed = saved.pushed()
        try:
            pack, unpack = top_hooks(True)  # checkpoint's own
            saved.push_these(pack, _naming(unpack, planned.unit.name))
            saved.push()
            self._found = planned.buffers.taken()
            self._attributes = Attributes(self._owners())
            before = planned.taken()
            output = planned.run(self._compiler, args, kwargs)
            self._rewritten = planned.learn(before)
            planned.buffers.learn(self._found)
            return output
        finally:
            saved.pop_to(pushed)

    def _again(self, tensors: Sequence[torch.Tensor]) -> None:
        planned = self._planned
        hooks = planned.hooks
        if graph_task() != -1:
            hooks.pins.pin(planned.unit)  # the nodes that come next read it as well
        planned.hook.before(backward=True)
        try:
            args, kwargs = self._arguments.filled(tensors)
            now = Attributes(self._owners())
            try:
                self._attributes.put_back()
                with self._found.again(), self._parameters_again():
                    context = self._attributes.context.copy()
                    context.run(planned.run, self._compiler, args, kwargs)
            finally:
                now.put_back()
        except Exception as error:
            if is_stopped_script(error):
                return
            planning = hooks.state.planning
            if isinstance(error, torch.OutOfMemoryError) and planning is not None:
                planning.recording.note(error)
            error.add_note(f"while {planned.unit.name} was computed again for its backward")
            raise
        finally:
            planned.hook.after(None)

    def _owners(self) -> list[dict[str, Any]]:
        return owners_of(self._planned.module, self._arguments.others)

    @contextlib.contextmanager
    def _parameters_again(self) -> Iterator[None]:
        """Leaves parameters as they are; version counters too, for nodes of the first run have
        saved them. Raises StrataError where the second run gives one another value. See Note
        [Recomputation]."""
        now = self._planned.parameters.taken(self._rewritten)
        with now.undone():
            try:
                yield
            finally:  # checkpoint ends a second run by an exception, too
                for name in now.differing():
                    self._planned.refuse_twice(name, "computed again")


def _naming(unpack: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Checkpoint's unpack, with errors that say whose they are."""

    def named(holder: Any) -> Any:
        try:
            return unpack(holder)
        except CheckpointError as error:
            raise StrataError(
                f"{name} cannot be recomputed: its forward gave other tensors the second time, so "
                "it depends on something that changed between forward and backward; pass "
                'activations="keep" to strata.wrap()'
            ) from error

    return named


def _above_checkpoint() -> bool:
    """Whether our saved-tensor hooks, on top now, lie above those of somebody's checkpoint."""
    top = top_hooks(True)
    above = getattr(top[0], "__self__", None) if top is not None else None
    below = getattr(above, "outer_pack", None)
    return getattr(below, "__module__", "") == "torch.utils.checkpoint"


def _same(value: Any) -> Any:
    return value
