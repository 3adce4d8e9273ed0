"""The gradients of one wrapped model, as `p.grad` shows them.

    state.gradients.show(index)           # p.grad: a PagedGradient, the user's own tensor, or None
    state.gradients.put(index, tensor)    # p.grad = tensor
    state.gradients.drop(index)           # p.grad = None
    state.gradients.hand_over()              # ahead of step(): the core has all of them

Note [Where a gradient is]. What a backward leaves lies in the core, which counts it. There it rests
until step(), unless somebody has a tensor that shares its memory: one that was assigned to
`p.grad`, or a view of what p.grad was read as. Then it is *held*: that tensor is the gradient,
whatever the core has (held_gradients.py). Zeros are noted, and take no memory before step(). What
step() has used is gone; its sum of squares stays.

Threads: the one that trains; hooks of autograd, under the GIL.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .._config.managed import DTYPE_NAMES
from .._core import adds_in_float32
from .._torch_compat import graph_task
from .grad_drops import GradientDrops
from .grad_shown import Shown
from .grad_tensor import PagedGradient, tensor_of
from .held_gradients import HeldGradients
from .ownership import is_shared
from .real_grads import drop_real, real_grad, set_real
from .shard_totals import ShardTotals, Squares

if TYPE_CHECKING:
    from .wrapped import Wrapped


class Gradients:
    """See Note [Where a gradient is].

    Invariant: a gradient that is held, zero or used is shown as such, in this order; any other is
    in the core, or there is none.
    """

    def __init__(self, state: Wrapped) -> None:
        self._state = state
        self.on_step = state.config["update"] == "on_step"
        sums = adds_in_float32(state.config)
        self._dtypes = [torch.float32 if sums else alias.dtype for alias in state.aliases]
        self._shown: dict[int, weakref.ref[Shown]] = {}
        self._held = HeldGradients(self._replace)
        self._zero: set[int] = set()
        self.drops = GradientDrops(state)
        self.used: set[int] = set()  # by step(), and neither dropped nor replaced since
        self._added: set[int] = set()  # of these, to some of which a backward would have added
        self.totals = ShardTotals(state, self._shard_squares)

    # What p.grad does -----------------------------------------------------------------------------

    def is_own(self, index: int) -> bool:
        """Whether the gradient is the user's own: that of a parameter in no group of the optimizer,
        which stays where autograd leaves it. Of several ranks it would be that of one of them."""
        state = self._state
        alone = state.ranks is None and state.shards is None
        return alone and not state.config["params"][index]["trainable"]

    def show(self, index: int) -> torch.Tensor | None:
        """The value of p.grad."""
        state = self._state
        if self.is_own(index):
            return real_grad(state.params[index])
        self.sort_out()
        state.steps.look_at_gradients()
        if graph_task() != -1 and (real := real_grad(state.params[index])) is not None:
            # A hook of the user's that autograd calls ahead of ours.
            if not self._there(index):
                return real
            state.hooks.land(index)
        if not self._there(index):
            return None
        if (given := self._held.given(index)) is not None:
            return given
        ref = self._shown.get(index)
        shown = ref() if ref is not None else None
        if shown is None:
            shown = Shown(self, index)
            self._shown[index] = weakref.ref(shown)
        return tensor_of(shown)

    def put(self, index: int, value: torch.Tensor | None) -> None:
        """Sets p.grad. Raises as torch does for a tensor that cannot be the gradient."""
        if value is None:
            self.drop(index)
            return
        if type(value) is PagedGradient and value.shows(self, index):
            return
        if self.is_own(index) and self._state.params[index].requires_grad:
            set_real(self._state.params[index], value)
            return
        self.sort_out()
        self.refuse_mode(index, "p.grad cannot be set")
        if self.is_shard(index):
            raise RuntimeError(
                f"p.grad of {self.name(index)}, a DTensor, cannot be set: its norm would be that "
                "of this process's shard. Change it in place (p.grad.mul_(...))"
            )
        state = self._state
        if isinstance(value, PagedGradient) or hasattr(value, "_strata"):  # of another parameter
            value = value.detach().clone()
        self._check(index, value)
        state.landings.wait()
        self._leave_values(index)
        drop_real(state.params[index])
        self.used.discard(index)
        self.totals.forget(index)
        self._held.give(index, value.to(self._dtypes[index]))

    def _check(self, index: int, value: torch.Tensor) -> None:
        state = self._state
        if not state.config["params"][index]["trainable"]:
            raise RuntimeError(f"{self.name(index)} is not trained: no room for a gradient")
        summed = isinstance(value, torch.Tensor) and value.dtype == self._dtypes[index]
        # torch's own check of everything, in its own words, on what nobody asks for a gradient.
        alias = state.aliases[index]
        alias.grad = value.to(alias.dtype) if summed else value
        alias.grad = None
        if value.layout is not torch.strided:
            raise RuntimeError(f"a sparse gradient of {self.name(index)}: strata takes dense ones")

    def drop(self, index: int) -> None:
        """p.grad = None. Whoever has what p.grad was keeps its values."""
        if self.is_own(index):
            drop_real(self._state.params[index])
            return
        self.sort_out()
        state = self._state
        state.landings.wait()
        if not self.on_step and self.has_landed(index):
            raise RuntimeError(
                f"the gradient of {state.names[index]!r} cannot be dropped alone with "
                f"update={state.config['update']!r}: call optimizer.zero_grad()"
            )
        self._leave_values(index)
        self.totals.forget(index)
        drop_real(state.params[index])
        self._held.drop(index)
        self._zero.discard(index)
        self.used.discard(index)
        self.drops.add(index)

    def zero(self, index: int) -> None:
        """p.grad.zero_(), also of one that step() has used."""
        self.refuse_mode(index, "it cannot be zeroed")
        self.totals.forget(index)
        if index in self._held:
            self._held.zero(index)
            return
        self._state.landings.wait()
        self._zero.add(index)
        self.used.discard(index)
        self.drops.add(index)

    def drop_all(self, zeros: bool = False) -> None:
        """Forgets all of them; `zeros`: those that there are become zero instead."""
        self.totals.forget_all()
        keeps = zeros and self.on_step
        there = set(filter(self._there, range(len(self._state.params)))) if keeps else set()
        if keeps:
            for index in there & self._held.indices():
                self._held.zero(index)
        else:
            for index in list(self._shown):
                self._leave_values(index)
        self._state.steps.drop_gradients()
        self.used.clear()
        if keeps:
            self._zero |= there
        else:
            self.forget()

    def refuse_zeros(self) -> None:
        """Raises RuntimeError where all of them are to become zero, and no mode but "on_step" would
        know of that."""
        there = [i for i in range(len(self._state.params)) if self._there(i)]
        if there and not self.on_step:
            raise RuntimeError(
                f"zero_grad(set_to_none=False): the gradient of {self.name(there[0])} rests in "
                f"strata's pages, and update={self._state.config['update']!r} has used it or may "
                "use it at any time, so it cannot be zeroed: pass set_to_none=True, or wrap with "
                "update='on_step'"
            )

    def refuse_second_use(self) -> None:
        """Raises RuntimeError ahead of a step where plain PyTorch would use a gradient again. Where
        updates run in the backward, a step may follow another to end what was interrupted."""
        if again := self.used if self.on_step else self.used & self._added:
            raise self._used_up("step()", "use again", min(again))

    def _used_up(self, call: str, would: str, index: int) -> RuntimeError:
        return RuntimeError(
            f"{call} after step() without zero_grad(): plain PyTorch would {would} the old "
            f"gradient of {self.name(index)}, which strata has already used up; call "
            "optimizer.zero_grad()"
        )

    def sort_out(self) -> None:
        """What an exception has left behind is cleared up before gradients are looked at."""
        state = self._state
        if not state.visits.idle and not state.hooks.frames.in_step():
            state.hooks.reset()

    def _there(self, index: int) -> bool:
        known = index in self._held or index in self._zero or index in self.used
        return known or self.has_landed(index)

    def has_landed(self, index: int) -> bool:
        """Whether the core has a gradient of this step, or one is on its way there."""
        if index in self.drops:
            return False
        return self._state.landings.has(index) or self._state.session.gradient_count(index) > 0

    def gather(self, index: int) -> torch.Tensor | None:
        """A float32 copy; None where there is none, or step() has used it."""
        lost = index in self.used and index not in self._held
        shown = None if lost else self.show(index)
        return None if shown is None else shown.detach().clone().float()

    # What PagedGradient asks ----------------------------------------------------------------------

    def shape(self, index: int) -> torch.Size:
        """Of the gradient."""
        return self._state.aliases[index].shape

    def dtype(self, index: int) -> torch.dtype:
        """Of the gradient: float32 where sums are."""
        return self._dtypes[index]

    @property
    def device(self) -> torch.device:
        """That p.grad is on."""
        return self._state.device

    def like(self, index: int) -> torch.Tensor | None:
        """A tensor that differs from the gradient in its values alone."""
        alias = self._state.aliases[index]
        return alias if alias.dtype == self._dtypes[index] else None

    def name(self, index: int) -> str:
        """Of the parameter."""
        return repr(self._state.names[index])

    def refuse_mode(self, index: int, what: str) -> None:
        """Raises RuntimeError where gradients are used up before anybody can look at them."""
        if not self.on_step:
            raise RuntimeError(
                f"the gradient of {self.name(index)} rests in strata's pages, and {what}: "
                f"update={self._state.config['update']!r} may begin its update at any time. Wrap "
                "with update='on_step', or use max_unit_norm= instead of clip_grad_norm_, "
                "strata.gather_grad(p) to look at it, and strata.GradScaler instead of "
                "torch.amp.GradScaler"
            )

    def squares(self, index: int) -> Squares | None:
        """The sum of its squares, and whether it was scaled and not rounded since that was taken.
        None: only its values tell. Of a shard, the squares of the whole."""
        self.sort_out()
        self.refuse_mode(index, "its norm cannot be asked for")
        if not self.is_shard(index):
            return self._own_squares(index)
        if index in self._held:  # others may have changed that
            self.totals.forget(index)
        return self.totals.of(index)

    @property
    def hidden(self) -> bool:
        """Whether their values lie with the ranks that own them."""
        return self._state.ranks is not None

    def is_shard(self, index: int) -> bool:
        """Whether other processes have other parts of it."""
        return self._state.shards is not None and index in self._state.shards

    def _shard_squares(self, index: int) -> Squares:
        """Of what this process has of a gradient. Rounding may tell: then of the values."""
        if not self._there(index):
            return 0.0, False
        own = self._own_squares(index)
        if own is None or (own[1] and self._dtypes[index] is torch.float16):
            return self.open(index).detach().double().square().sum().item(), False
        return own

    def _own_squares(self, index: int) -> Squares | None:
        if index in self._held:
            return None
        if index in self._zero and not self.has_landed(index):
            return 0.0, False
        self._state.landings.wait()
        self._state.steps.look_at_gradients()
        return self._state.session.gradient_squares(index)

    def scale(self, index: int, factor: float, divides: bool) -> bool:
        """Notes that it is multiplied with, or divided by, a factor, for which REQUIRES of
        Gradients::scale in engine/gradients.hpp hold. False, and nothing done: it has to be done on
        its values."""
        self.totals.forget(index)
        if index in self._held:
            return False
        if not self.has_landed(index):
            return index in self._zero and not math.isnan(factor)
        self._state.landings.wait()
        return self._state.session.scale_gradient(index, factor, divides)

    def open(self, index: int) -> torch.Tensor:
        """Its true values: the tensor that it is held in, or a new one. close() comes next."""
        self.refuse_mode(index, "its values cannot be read")
        if index in self._held:
            return self._held.tensor(index)
        self._refuse_used(index)
        # Not one of a user's inference mode: its version tells whether it was changed.
        with torch.inference_mode(False), torch.no_grad():
            if not self.has_landed(index):
                if index not in self._zero:
                    raise RuntimeError(f"there is no gradient of {self.name(index)} any more")
                return torch.zeros(self.shape(index), dtype=self._dtypes[index], device=self.device)
            return self._state.read(index, "grad").to(self.device, self._dtypes[index])

    def close(self, index: int, values: torch.Tensor, changed: bool) -> None:
        """Something was done with what open() returned. REQUIRES: it is still the gradient."""
        if changed or index in self._held:
            self.totals.forget(index)
        if index in self._held:
            return
        if is_shared(values):
            self._held.share(index, values, changed)
        elif changed:
            self._replace(index, values)

    def _refuse_used(self, index: int) -> None:
        if index in self.used and not self.has_landed(index):
            raise RuntimeError(
                f"the gradient of {self.name(index)} was used by optimizer.step(), and its memory "
                "with it: only its norm is known. Read or copy it (p.grad.clone()) ahead of step()"
            )

    def _replace(self, index: int, values: torch.Tensor) -> None:
        """Has the core take these values for the gradient."""
        self.totals.forget(index)
        state = self._state
        source = values.detach().to(state.device, self._dtypes[index]).contiguous()
        state.landings.wait()
        dtype = DTYPE_NAMES[source.dtype]
        state.session.replace_gradient(index, source.data_ptr(), dtype, stream=state.stream())
        self._zero.discard(index)
        self.used.discard(index)

    def _leave_values(self, index: int) -> None:
        """The gradient is about to go: whoever has what p.grad showed keeps its values."""
        ref = self._shown.pop(index, None)
        shown = ref() if ref is not None else None
        if shown is None:
            return
        there = index in self._held or index in self._zero or self.has_landed(index)
        keeps = there and self.on_step and not self.hidden
        shown.leave(self.open(index) if keeps else None)

    # A step ---------------------------------------------------------------------------------------

    def land(self, index: int, grad: torch.Tensor) -> bool:
        """A backward adds to the gradient. True: nothing is left to do, for it is held, or was used
        up: then this is dropped, and reading it, or stepping ahead of zero_grad(), is refused."""
        if index in self.used:
            if self._state.config["update"] == "in_backward":
                raise self._used_up("backward() of update='in_backward'", "add to", index)
            self._added.add(index)
            return True
        self.totals.forget(index)
        if index in self._held:
            self._held.tensor(index).detach().add_(grad)
            return True
        self._zero.discard(index)
        return False

    def hand_over(self) -> None:
        """Ahead of a step: the core gets what is held, and zeros."""
        self.drops.settle()
        self._held.land_all()
        state = self._state
        for index in [i for i in self._zero if not self.has_landed(i)]:
            zeros = self.open(index)
            state.landings.wait()
            dtype = DTYPE_NAMES[zeros.dtype]  # of ranks, each adds its own
            state.session.land_gradient(index, zeros.data_ptr(), dtype, stream=state.stream())

    def any_new(self) -> bool:
        """Whether any but zeros waits for a step."""
        self.sort_out()
        return any(map(self.has_landed, range(len(self._state.params)))) or self._held.any_new()

    def end_step(self, landed: Iterable[int]) -> None:
        """The step has used the gradients that had landed, except those held or zero."""
        self._held.end_step()
        self._added.clear()
        self.used |= set(landed) - self._held.indices() - self._zero

    def forget(self) -> None:
        """There are no gradients, nor what they were."""
        self.totals.forget_all()
        for ref in self._shown.values():
            if (shown := ref()) is not None:
                shown.leave(None)
        self._shown.clear()
        self._held.clear()
        self._zero.clear()
        self.used.clear()
