"""Runs the forward of a unit as the plan says: as it is, recomputed in backward, or on slices.

    handle = plan_forward(hooks, hook, module, unit)     # takes the place of module.forward
    unit.activation, unit.slices = "recompute", 4        # obeyed from the next forward on
    handle.remove()

The object stands in the instance's own `forward`; class and torch are left alone, and a copy or a
pickle of the module has its plain forward. Use from the thread that trains; recomputations come
from autograd's threads, under the GIL.

Note [Recomputation]. It is torch.utils.checkpoint's, non-reentrant, which keeps random numbers and
autocast as they were. Our saved-tensor hooks lie above its own in both runs, so parameters are kept
by unit (saved.py). All tensors go through checkpoint as positional arguments, so that the hooks
below see each of them as a saved tensor. Buffers that the forward changes, caches and containers
are in the second run as they were before the first, so nothing is counted twice.
"""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from .arguments import Arguments, layers_of, update_cache
from .buffers import Buffer, Buffers, as_they_were
from .errors import StrataError
from .slicing import Verdict, batch_size, cut, fits, merged
from .trial import Verdicts
from .wrapped import Unit

if TYPE_CHECKING:
    from .hooks import Hooks, ModuleHook

log = logging.getLogger("strata")

# What torch.compile leaves alone, and all that it calls. torch's own way, which loads the compiler
# late: torch.compiler.disable would when strata is imported.
untraced: Any = torch._compile._disable_dynamo
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id


def plan_forwards(hooks: "Hooks", by_module: "dict[nn.Module, ModuleHook]") -> list["Handle"]:
    """Takes over the forward of every module that alone reads a unit of its own."""
    root = hooks.state.model
    handles = []
    for module, hook in by_module.items():
        unit = hook.unit
        readers = sum(unit in other.units for other in by_module.values())
        nested = any(inner in by_module for inner in module.modules() if inner is not module)
        if module is not root and readers == 1 and not nested:
            handles.append(Handle(PlannedForward(hooks, hook, module, unit)))
            unit.may_recompute = True
    return handles


class Handle:
    """Gives a module its own forward back."""

    def __init__(self, planned: "PlannedForward") -> None:
        self._planned = planned
        planned.module.forward = planned

    def remove(self) -> None:
        """Undoes what the constructor did; where somebody wrapped our forward, it turns inert."""
        planned = self._planned
        planned.removed = True
        own = planned.module.__dict__
        if own.get("forward") is planned:
            if planned.was_own:
                planned.module.forward = planned.plain
            else:
                del own["forward"]


class PlannedForward:
    """The forward of one module, under the plan of its unit."""

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
        self._verdicts = Verdicts(module, self.plain)
        self._layers = layers_of(module)
        self._told = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch between the hooks of the module."""
        planned = self.unit.activation == "recompute" or self.hooks.state.recorder.recording
        if self.removed or not planned:
            return self.plain(*args, **kwargs)
        return self._as_planned(args, kwargs)

    @untraced
    def _as_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit, state = self.unit, self.hooks.state
        recomputes = unit.activation == "recompute"
        recording = state.recorder.recording
        if not self._is_training():
            return self.plain(*args, **kwargs)
        arguments = Arguments((args, kwargs), self._layers)
        if not any(t.requires_grad for t in arguments.tensors) and not unit.trainable:
            return self.plain(*args, **kwargs)
        if recording:
            state.recorder.inputs(arguments.tensors)
        batch = batch_size(arguments.tensors)
        verdict = self._verdict(arguments, batch)
        if not recomputes:
            return self.plain(*args, **kwargs)
        count = min(unit.slices, batch)
        if count < 2 or verdict is None or verdict.reason:
            return self._checkpointed(arguments, (args, kwargs))
        return self._sliced(arguments, (args, kwargs), verdict.cut, count)

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
        if not torch.is_grad_enabled() or _graph_task() != -1 or torch.jit.is_tracing():
            return False
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training:
            return False  # Transformers' own, which lies within this forward
        return not _above_checkpoint()

    def _verdict(self, arguments: Arguments, batch: int) -> Verdict | None:
        """Whether the batch may be cut; found out when the planner or the plan wants to know."""
        unit, state = self.unit, self.hooks.state
        asked = state.recorder.recording or unit.slices > 1
        if not asked or not state.may_split:
            return None
        begin = state.recorder.now()
        verdict = self._verdicts.find(arguments, trial=True)
        state.recorder.ignore(begin, state.recorder.now())
        if verdict is not None:
            self._note(verdict.reason, batch)
        return verdict

    def _note(self, reason: str, batch: int) -> None:
        """Keeps a verdict for the planner, and says once why a unit does not run on slices."""
        unit = self.unit
        unit.unsplit_reason = reason
        unit.slices_max = 1 if reason else batch
        if reason and unit.slices > 1 and reason != self._told:
            log.info("%s runs on the whole batch: %s", unit.name, reason)
            self._told = reason

    def _checkpointed(self, arguments: Arguments, own: Any) -> Any:
        tensors = arguments.tensors
        return checkpoint(_Call(self, arguments, own), *tensors, use_reentrant=False)

    def _sliced(self, arguments: Arguments, own: Any, cut_ones: Sequence[bool], count: int) -> Any:
        batch = batch_size(arguments.tensors)
        outputs = []
        for piece in cut(arguments.tensors, batch, count):
            nest = arguments.filled(piece)
            part = Arguments(nest, self._layers)
            caches = part.caches
            output = self._checkpointed(part, nest)
            outputs.append(Arguments((output, caches), self._layers))
        if not fits(outputs, cut_ones, batch):
            self._note("its output has another form than when slices were tried", batch)
            self._verdicts.refuse(arguments, self.unit.unsplit_reason)
            return self._checkpointed(arguments, own)
        result, caches = merged(outputs, cut_ones)
        for cache, newer in zip(arguments.caches, caches, strict=True):
            update_cache(cache, newer)
        return result


class _Call:
    """One forward under checkpoint, and its recomputations. See Note [Recomputation]."""

    def __init__(self, planned: PlannedForward, arguments: Arguments, own: Any) -> None:
        self._planned = planned
        self._arguments = arguments
        self._own = own  # what the first run is called with: the caller's very objects
        self._changed: list[Buffer] = []
        arguments.forget()  # checkpoint keeps the tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Called by checkpoint in forward, and in backward when a node wants a saved tensor."""
        own, self._own = self._own, None
        return self._again(tensors) if own is None else self._first(*own)

    def _first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        planned = self._planned
        saved = planned.hooks.saved
        pack, unpack = _top_hooks(True)  # checkpoint's own
        _push_hooks(pack, _naming(unpack, planned.unit.name))
        try:
            pushed = saved.push()
            try:
                before = planned.buffers.before()
                output = planned.plain(*args, **kwargs)
                self._changed = planned.buffers.changed(before)
                return output
            finally:
                if pushed and saved.on_top():
                    saved.pop()
        finally:
            _pop_hooks()

    def _again(self, tensors: Sequence[torch.Tensor]) -> None:
        planned = self._planned
        hooks = planned.hooks
        if _graph_task() != -1:
            hooks.pins.pin(planned.unit)  # the nodes that come next read it as well
        planned.hook.before(backward=True)
        try:
            args, kwargs = self._arguments.filled(tensors)
            with as_they_were(self._changed):
                planned.plain(*args, **kwargs)
        except Exception as error:
            error.add_note(f"while {planned.unit.name} was computed again for its backward")
            raise
        finally:
            planned.hook.after(None)


def _naming(unpack: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Checkpoint's unpack, with errors that say whose they are."""

    def named(holder: Any) -> Any:
        try:
            return unpack(holder)
        except CheckpointError as error:
            raise StrataError(
                f"{name} cannot be recomputed: its forward gave other tensors the second time, so "
                "it depends on something that changed between forward and backward; pass "
                'activations="keep" or "swap" to strata.wrap()'
            ) from error

    return named


def _above_checkpoint() -> bool:
    """Whether our saved-tensor hooks, on top now, lie above those of somebody's checkpoint."""
    top = _top_hooks(True)
    above = getattr(top[0], "__self__", None) if top is not None else None
    below = getattr(above, "outer_pack", None)
    return getattr(below, "__module__", "") == "torch.utils.checkpoint"


def _same(value: Any) -> Any:
    return value
