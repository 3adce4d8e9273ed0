"""The optimizer that strata.wrap() returns.

    optimizer.step()          # starts the updates; the next forward of each unit waits for its own
    optimizer.zero_grad()
    complete_unit(state, u)   # in_backward: those of a unit, from the hook of its last gradient

It shares the very list `param_groups` with the optimizer that was given to wrap(), so learning-rate
schedulers built on either of the two work. So do the hooks that are registered on either, ahead of
wrap() or behind it: they are in the same dictionaries.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import _core
from .._config.update_modes import check_loss_scale
from .._errors import StrataError
from .._optim.foreign import Foreign
from .._optim.groups import check_options, group_spec
from .loaded_state import saved_entries, saved_groups
from .optimizer_pages import StatePages
from .optimizer_state import OptimizerState, wait_for_updates, without_others
from .unit import Unit
from .visits import StepCall
from .wrapped import Wrapped

if TYPE_CHECKING:
    from .._core import GroupSpec


# Where torch keeps the hooks of an optimizer.
_HOOKS = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def current_groups(state: Wrapped) -> list[GroupSpec]:
    """The hyperparameters of the updates that begin in this backward: read when the first does."""
    if state.steps.groups_used is None:
        state.steps.groups_used = cast(StrataOptimizer, state.optimizer).group_specs()
    return state.steps.groups_used


def complete_unit(state: Wrapped, unit: Unit) -> None:
    """Starts the update of a unit with what has landed (update="in_backward")."""
    norm = cast(StrataOptimizer, state.optimizer).max_unit_norm
    state.session.complete(unit.index, current_groups(state), norm)


def clips_units(state: Wrapped) -> bool:
    """Whether the gradients of a unit are clipped together, so that all are needed first."""
    return cast(StrataOptimizer, state.optimizer).max_unit_norm > 0


class StrataOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer given to wrap(): same groups, same arithmetic, state in pages."""

    _shown: dict[torch.Tensor, dict[str, Any]] | None = None  # while a state dict is made

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        state: Wrapped,
        *,
        max_grad_norm: float | None,
        max_unit_norm: float | None,
        skip_nonfinite: bool,
        foreign: Foreign | None = None,
    ) -> None:
        """`inner` keeps its groups and is asked for nothing else; `foreign` runs its class."""
        # torch's own way to make an optimizer of given parts; its __init__ would copy the list.
        super().__setstate__(
            {
                "defaults": inner.defaults,
                "param_groups": inner.param_groups,
                **{name: getattr(inner, name) for name in _HOOKS},
            }
        )
        inner.state.clear()  # Adagrad's sums rest in pages now
        self._inner = inner
        self._guard = inner.register_step_pre_hook(_refuse_step)
        self._foreign = foreign
        self._group_of = _group_of(inner.param_groups)
        # What was laid out for each group.
        self._kept = [foreign.kept(g) for g in inner.param_groups] if foreign is not None else []
        self._wrapped = state
        self.pages = StatePages(
            state, inner, foreign, self._kept, lambda: self.param_groups, self.group_specs
        )
        self._state = OptimizerState(self.pages)
        self._max_grad_norm = max_grad_norm or 0.0
        self.max_unit_norm = max_unit_norm or 0.0  # 0: no clipping
        self._skip_nonfinite = skip_nonfinite

    def release_inner(self) -> None:
        """Lets the optimizer that came in step on its own again, with state that begins anew. Most
        classes make it in their first step; Adagrad, before torch 2.13, when it is constructed."""
        self._guard.remove()
        inner = self._inner
        if isinstance(inner, torch.optim.Adagrad) and not inner.state:
            groups = [dict(group) for group in inner.param_groups]
            inner.state.update(torch.optim.Adagrad(groups).state)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss_scale: float | None = None,
        overflowed: bool = False,
    ) -> Any:
        """Starts the update of every parameter whose gradient has landed, and returns at once.

        loss_scale: what the loss was multiplied by; strata.GradScaler passes it. Gradients are
        divided by it, and nothing is updated where one of them is infinite or NaN.
        overflowed: one of them was when strata.GradScaler divided them: nothing is updated,
        whatever they are now.
        """
        if loss_scale is not None:
            self.check_loss_scale()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._wrapped
        state.hooks.reset()
        state.refuse_half_load("step()")
        state.gradients.refuse_second_use()
        if state.snapshots is not None:
            state.snapshots.raise_failure()
        call = state.visits.add(StepCall())
        state.refuse_visits()
        state.landings.wait()
        state.gradients.hand_over()
        groups = self.group_specs()
        _check_unchanged(state.steps.groups_used, groups)
        result = state.session.step(
            groups,
            self._max_grad_norm,
            loss_scale or 1.0,
            self._skip_nonfinite or loss_scale is not None or overflowed,
            self.max_unit_norm,
            math.inf if overflowed else state.gradients.totals.of_all(),
        )
        state.steps.note(result)
        if state.planning is None:
            state.steps.end()
        else:
            state.planning.end_step()
        state.visits.end(call)
        # Schedulers built on the inner optimizer look here to see whether step() came first.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        return loss

    def check_loss_scale(self) -> None:
        """Raises RuntimeError where steps of dynamic loss scaling cannot be skipped."""
        check_loss_scale(self._wrapped.config)
        if self._wrapped.shards is not None and not self._wrapped.gradients.on_step:
            raise RuntimeError(
                "GradScaler needs the gradients of all shards of a DTensor at step(), and "
                f"update={self._wrapped.config['update']!r} does not wait for them: wrap with "
                "update='on_step'"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients that have landed since the last step(), or makes them zero.

        Raises RuntimeError where they were used before step(): with update="in_backward", and with
        LockFree where they were added to gradients that still waited for their update. Those modes
        keep no gradients, so that they cannot become zero either.
        """
        state = self._wrapped
        state.hooks.reset()
        state.refuse_half_step("zero_grad()")
        if not set_to_none:
            state.gradients.refuse_zeros()
        advice = "call optimizer.step() ahead of zero_grad(), or wrap with update='on_step'"
        try:
            state.gradients.drop_all(zeros=not set_to_none)
        except StrataError as error:
            if getattr(error, "fault", "") != "config":
                raise
            raise RuntimeError(
                f"zero_grad() between backward() and step(): {error}; {advice}"
            ) from error

    @property
    def clips(self) -> bool:
        """Whether step() clips gradients by itself."""
        return self._max_grad_norm > 0 or self.max_unit_norm > 0

    @property
    def last_finite(self) -> bool:
        """Whether all gradients of the last step() were."""
        result = self._wrapped.steps.last
        return result is None or result["finite"]

    def group_specs(self, groups: list[dict[str, Any]] | None = None) -> list[GroupSpec]:
        """The hyperparameters of all groups, or of `groups`, now, as the core takes them. Raises
        ValueError where they make no sense, or need what wrap() laid out no room for, and
        RuntimeError where a parameter is in another group than it was."""
        self._check_members()
        groups = groups or self.param_groups
        name = type(self._inner).__name__
        for group in groups:
            check_options(name, group)
        specs = [group_spec(self._inner, g, group, self._foreign) for g, group in enumerate(groups)]
        if self._foreign is not None:
            self._foreign.check_kept(groups, self._kept)
        _core.check_groups(self._wrapped.config["groups"], specs)
        return specs

    def _check_members(self) -> None:
        state, now = self._wrapped, _group_of(self.param_groups)
        if now == self._group_of:
            return
        changed = [
            repr(name)
            for name, parameter in zip(state.names, state.params, strict=True)
            if now.get(id(parameter)) != self._group_of.get(id(parameter))
        ]
        raise RuntimeError(
            f"{changed[0] if changed else 'another tensor'} was put into a parameter group, or "
            "taken out of one, after strata.wrap(), which laid out each parameter for its group: "
            "undo that, or call strata.unwrap(model) first and wrap again. To have a parameter not "
            "updated any more, freeze it: p.requires_grad_(False)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError. Called by copy.copy, copy.deepcopy, pickle and torch.save."""
        raise TypeError(
            "an optimizer that strata.wrap() returned cannot be copied or pickled, for its state "
            "rests in the pages of one model: copy optimizer.state_dict(), or write both with "
            "strata.save(model, path)"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises TypeError, as __reduce_ex__() does."""
        raise TypeError(
            "an optimizer that strata.wrap() returned cannot be made of parts: "
            "optimizer.load_state_dict() takes over a state"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: the pages of the optimizer's state were laid out by wrap()."""
        raise RuntimeError(
            "parameter groups cannot be added after strata.wrap(), which laid out pages for those "
            "that there were: give what is in none of them an optimizer of its own, or call "
            "strata.unwrap(model) first and wrap again, with all groups"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's: moments and steps as they are when they are looked at, whenever that is; a
        copy of now is copy.deepcopy(optimizer.state_dict()). They rest in pages and are read one at
        a time, by torch.save too. Moments are float32, on the CPU. One that is changed in place
        becomes a copy, which load_state_dict() takes over."""
        wait_for_updates(self._wrapped)
        members = self.pages.members().items()
        shown = {parameter: self.pages.shown(index, live=False) for parameter, index in members}
        self._shown = {parameter: entry for parameter, entry in shown.items() if entry}
        try:
            return super().state_dict()
        finally:
            self._shown = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict()` of this or of the plain torch optimizer returned. Raises
        ValueError, and changes nothing, where that is of another model or optimizer, is damaged, or
        has options that cannot be followed."""
        state = self._wrapped
        state.hooks.reset()
        state.refuse_half_step("load_state_dict()")
        state_dict = copy.copy(state_dict)  # as in torch, for hooks that change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = saved_groups(state_dict, self.param_groups)
        merged = [self._merged(g, new) for g, new in zip(self.param_groups, groups, strict=True)]
        specs = self.group_specs(merged)
        saved = saved_entries(state_dict, groups)
        entries = [
            (
                index := state.index_of(parameter),
                g,
                without_others(saved.get(number, {}), state, index),
            )
            for g, group in enumerate(self.param_groups)
            for parameter, number in zip(group["params"], groups[g]["params"], strict=True)
        ]
        trained = [e for e in entries if state.config["params"][e[0]]["trainable"]]
        for index, g, entry in trained:
            self.pages.check(index, merged[g], specs[g], entry)
        for group, new in zip(self.param_groups, merged, strict=True):
            group.update(new)
        for index, _, entry in trained:
            self.pages.write(index, entry)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _merged(self, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The group with the saved options in place of its own."""
        merged = {**group, **saved, "params": group["params"]}
        if isinstance(self._inner, torch.optim.AdamW):
            merged["decoupled_weight_decay"] = True  # as AdamW does, for states of Adam
        return merged

    @property
    def state(self) -> Any:
        """As torch's, of what rests in pages: see optimizer_state.py."""
        return self._state if self._shown is None else self._shown

    @state.setter
    def state(self, entries: Any) -> None:
        if entries is self._state:
            return
        before, self._state = weakref.ref(self._state), OptimizerState(self.pages)
        if (held := before()) is not None:  # by the user, who may put it back
            held.keep()
        self._state.replace(entries)

    @state.deleter
    def state(self) -> None:
        raise AttributeError("optimizer.state cannot be removed: call optimizer.state.clear()")


def _group_of(groups: list[dict[str, Any]]) -> dict[int, int]:
    """The number of the group that each parameter is in, by the parameter's id()."""
    return {id(parameter): g for g, group in enumerate(groups) for parameter in group["params"]}


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch ahead of a step of the optimizer that was given to wrap(), which is refused,
    and of the one that wrap() returned."""
    if not isinstance(optimizer, StrataOptimizer):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was given to strata.wrap(): call step() of the "
            "optimizer that wrap() returned"
        )


def _check_unchanged(used: list[GroupSpec] | None, now: list[GroupSpec]) -> None:
    """Raises where hyperparameters differ from those that updates began with in the backward."""
    for g, (old, new) in enumerate(zip(used or now, now, strict=True)):
        for name, value in new.items():
            if value != old[name]:  # type: ignore[literal-required]
                raise RuntimeError(
                    f"{name} of parameter group {g} was changed from {old[name]} to {value} "  # type: ignore[literal-required]
                    "between backward() and step(), and update='in_backward' has used it already: "
                    "change it behind step(), as schedulers do, or wrap with update='on_step'"
                )
