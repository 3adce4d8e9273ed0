"""Takes gradients from autograd to the core as they become complete.

    parameter.register_post_accumulate_grad_hook(LandHook(hooks, index))

As all hooks of strata it belongs to one model: in a copy or a pickle nothing of it is left.
"""

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._config.managed import DTYPE_NAMES
from .._runtime.ownership import owns_memory
from .._runtime.real_grads import drop_real, real_grad
from .._runtime.streams import owned_by_graph
from .._torch_compat import awaited

if TYPE_CHECKING:
    from .hooks import Hooks


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the model: nothing."""


class Uncopied:
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


class LandHook(Uncopied):
    """Takes the gradient of one parameter to the core.

    Refers weakly: Python's garbage collector does not look into this kind of hook, so the cycle of
    model, parameter and hook would never be found.
    """

    __slots__ = ("adds", "dtype_name", "hooks", "in_backward", "index", "unit")

    def __init__(self, hooks: "Hooks", index: int) -> None:
        self.hooks = weakref.ref(hooks)
        self.index = index
        self.unit = hooks.state.unit_of[index]
        self.adds = hooks.state.config["accumulate"] or hooks.state.config["update"] == "on_step"
        self.in_backward = hooks.state.config["update"] == "in_backward"
        self.dtype_name = hooks.state.config["params"][index]["dtype"]

    def __call__(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient is complete, once per backward."""
        hooks, index = self.hooks(), self.index
        grad = real_grad(parameter)
        drop_real(parameter)
        if hooks is None or grad is None:
            return
        state = hooks.state
        if state.shards is not None:
            grad = awaited(grad)
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {state.names[index]!r} is sparse, which strata does not support: "
                "build the embedding with sparse=False"
            )
        if state.gradients.land(index, grad):
            hooks.pins.land(index)
            return
        if not self.adds and state.gradients.has_landed(index):
            raise RuntimeError(
                f"a second gradient of {state.names[index]!r} before step(): "
                f"update={state.config['update']!r} has used the first one already, or may have; "
                "wrap with update='on_step' for several backward calls per step"
            )
        grad = grad.detach().contiguous()
        if DTYPE_NAMES.get(grad.dtype) != self.dtype_name:
            grad = grad.to(parameter.dtype)
        # See Note [Memory of graphs] in streams.py; a custom backward may return a parameter's own.
        if owned_by_graph(grad) or state.find(grad.data_ptr()) >= 0:
            grad = grad.clone()
        state.steps.note_backward()
        state.recorder.land()
        with state.recorder.paused():
            state.landings.put(partial(self._land, hooks, grad), grad.nbytes, index)
            if state.recorder.recording:  # plans count what is under way apart
                del grad
                state.landings.wait()
        hooks.pins.land(index)

    def _land(self, hooks: "Hooks", grad: torch.Tensor, stream: int) -> None:
        """In its turn among the landings of the model."""
        state, session = hooks.state, hooks.state.session
        if self.in_backward and not session.gradient_fits(self.index):
            hooks.pins.make_way(self.unit)
        session.land_gradient(
            self.index,
            grad.data_ptr(),
            self.dtype_name,
            stream=stream,
            # What is lent would count as memory of the computation, in a step that is measured.
            owner=grad if not state.recorder.measuring and owns_memory(grad) else None,
        )
