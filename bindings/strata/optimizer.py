"""The optimizer that strata.wrap() returns, and what of torch.optim it can stand for.

    optimizer.step()          # starts the updates; the next forward of each unit waits for its own
    optimizer.zero_grad()
    complete_unit(state, u)   # in_backward: those of a unit, from the hook of its last gradient

It shares the very list `param_groups` with the optimizer that was given to wrap(), so learning-rate
schedulers built on either of the two work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from . import _core
from .errors import StrataError
from .foreign import NATIVE, Foreign, make_foreign
from .group_options import Numbers, check_class, check_options
from .loaded_state import check_entry, saved_entries, saved_groups
from .update_modes import check_loss_scale
from .visits import Change
from .wrapped import Unit, Wrapped

if TYPE_CHECKING:
    from ._core import GroupSpec, Kind

MOMENT_NAMES: dict[str, list[tuple[Kind, str]]] = {
    "adamw": [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")],
    "adam": [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")],
    "sgd": [("moment1", "momentum_buffer")],
    "lion": [("moment1", "exp_avg")],
    "adagrad": [("moment1", "sum")],
}

COUNTED = ("adamw", "adam", "adagrad")  # their classes keep the number of a step


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Foreign | None:
    """Raises where strata cannot stand for this optimizer on this model.

    Returns what runs its class; None where there are kernels for it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, StrataOptimizer):
        raise ValueError("this optimizer already belongs to a wrapped model")
    # Adagrad has a state before its first step.
    if any(entry.get("step", 1) > 0 for entry in optimizer.state.values()):
        raise ValueError(
            "the optimizer already has state from earlier steps: wrap a fresh one, then call "
            "load_state_dict(old.state_dict()) on the optimizer that strata.wrap() returns"
        )
    own = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        check_options(type(optimizer).__name__, group)
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"the optimizer was built from other parameters: number {i} of group {g}, of "
                    f"shape {tuple(parameter.shape)}, is not in the model"
                )
    foreign = make_foreign(optimizer)
    if foreign is None:
        check_class(optimizer)
    return foreign


def group_spec(
    optimizer: torch.optim.Optimizer,
    number: int,
    group: dict[str, Any],
    foreign: Foreign | None = None,
) -> GroupSpec:
    """The hyperparameters of group `number`, now, as the core takes them. Raises ValueError, with
    group and option, for what is no number."""
    option = Numbers(number, group)
    if foreign is not None:
        return _foreign_spec(option, group, foreign)
    beta1, beta2 = option.pair("betas")
    rule = NATIVE[type(optimizer)]
    if rule in ("adam", "adamw"):  # AdamW is Adam with this option, which may be changed
        rule = "adamw" if group.get("decoupled_weight_decay", rule == "adamw") else "adam"
    return {
        "rule": rule,  # type: ignore[typeddict-item]
        "lr": option.needed("lr"),
        "beta1": beta1,
        "beta2": beta2,
        "eps": option("eps"),
        "weight_decay": option.needed("weight_decay"),
        "momentum": option("momentum"),
        "dampening": option("dampening"),
        "lr_decay": option("lr_decay"),
        # Adagrad's sums begin with what it was built with, whatever its groups say.
        "initial_accumulator": Numbers(number, optimizer.defaults)("initial_accumulator_value"),
        "nesterov": bool(group.get("nesterov", False)),
        "maximize": bool(group.get("maximize", False)),
    }


def _foreign_spec(option: Numbers, group: dict[str, Any], foreign: Foreign) -> GroupSpec:
    """The core needs to know only how much is kept; the class takes its options from `foreign`."""
    return {
        "rule": "foreign", "lr": option.needed("lr"), "beta1": 0.0, "beta2": 0.0, "eps": 0.0,
        "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "lr_decay": 0.0,
        "initial_accumulator": 0.0, "nesterov": False, "maximize": False,
        "options": foreign.remember(group), "moments": len(foreign.kept(group).moments),
    }  # fmt: skip


def moments_of(spec: GroupSpec) -> list[tuple[Kind, str]]:
    """The moments that the rule of a group keeps: as the core names them, and as torch does."""
    if spec["rule"] == "foreign":
        moments: list[Kind] = ["moment1", "moment2"]
        return [(kind, kind) for kind in moments[: spec["moments"]]]
    return MOMENT_NAMES[spec["rule"]] if spec["rule"] != "sgd" or spec["momentum"] else []


def current_groups(state: Wrapped) -> list[GroupSpec]:
    """The hyperparameters of the updates that begin in this backward: read when the first does."""
    if state.groups_used is None:
        state.groups_used = cast(StrataOptimizer, state.optimizer).group_specs()
    return state.groups_used


def complete_unit(state: Wrapped, unit: Unit) -> None:
    """Starts the update of a unit with what has landed (update="in_backward")."""
    norm = cast(StrataOptimizer, state.optimizer).max_unit_norm
    state.session.complete(unit.index, current_groups(state), norm)


def clips_units(state: Wrapped) -> bool:
    """Whether the gradients of a unit are clipped together, so that all are needed first."""
    return cast(StrataOptimizer, state.optimizer).max_unit_norm > 0


class StrataOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer given to wrap(): same groups, same arithmetic, state in pages."""

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
        self.__setstate__(
            {
                "defaults": inner.defaults,
                "state": defaultdict(dict),
                "param_groups": inner.param_groups,
            }
        )
        inner.state.clear()  # Adagrad's sums rest in pages now
        self._inner = inner
        self._foreign = foreign
        # What was laid out for each group.
        self._kept = [foreign.kept(g) for g in inner.param_groups] if foreign is not None else []
        self._wrapped = state
        self._max_grad_norm = max_grad_norm or 0.0
        self.max_unit_norm = max_unit_norm or 0.0  # 0: no clipping
        self._skip_nonfinite = skip_nonfinite

    def give_back(self) -> None:
        """Lets the optimizer that came in step on its own again, with state that begins anew. Most
        classes make it in their first step; Adagrad, before torch 2.13, when it is constructed."""
        inner = self._inner
        if isinstance(inner, torch.optim.Adagrad) and not inner.state:
            groups = [dict(group) for group in inner.param_groups]
            inner.state.update(torch.optim.Adagrad(groups).state)

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, loss_scale: float | None = None
    ) -> Any:
        """Starts the update of every parameter whose gradient has landed, and returns at once.

        loss_scale: what the loss was multiplied by; strata.GradScaler passes it. Gradients are
        divided by it, and nothing is updated where one of them is infinite or NaN.
        """
        if loss_scale is not None:
            check_loss_scale(self._wrapped.config)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._wrapped
        state.hooks.reset()
        state.refuse_half_load("step()")
        change = state.visits.add(Change())
        state.refuse_visits()
        state.landings.wait()
        groups = self.group_specs()
        _check_unchanged(state.groups_used, groups)
        result = state.session.step(
            groups,
            self._max_grad_norm,
            loss_scale or 1.0,
            self._skip_nonfinite or loss_scale is not None,
            self.max_unit_norm,
        )
        state.note_step(result)
        if state.planning is None:
            state.end_step()
        else:
            state.planning.end_step()
        state.visits.end(change)
        # Schedulers built on the inner optimizer look here to see whether step() came first.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients that have landed since the last step().

        Raises RuntimeError where they were used before step(): with update="in_backward", and with
        LockFree where they were added to gradients that still waited for their update.
        """
        state = self._wrapped
        state.hooks.reset()
        state.refuse_half_step("zero_grad()")
        advice = "call optimizer.step() ahead of zero_grad(), or wrap with update='on_step'"
        change = state.visits.add(Change())
        try:
            state.drop_gradients()
        except StrataError as error:
            if getattr(error, "fault", "") != "config":
                raise
            raise RuntimeError(
                f"zero_grad() between backward() and step(): {error}; {advice}"
            ) from error
        state.visits.end(change)

    @property
    def last_finite(self) -> bool:
        """Whether all gradients of the last step() were."""
        result = self._wrapped.last_step
        return result is None or result["finite"]

    def group_specs(self, groups: list[dict[str, Any]] | None = None) -> list[GroupSpec]:
        """The hyperparameters of all groups, or of `groups`, now, as the core takes them. Raises
        ValueError where they make no sense, or need what wrap() laid out no room for."""
        groups = groups or self.param_groups
        name = type(self._inner).__name__
        for group in groups:
            check_options(name, group)
        specs = [group_spec(self._inner, g, group, self._foreign) for g, group in enumerate(groups)]
        if self._foreign is not None:
            self._foreign.check_kept(groups, self._kept)
        _core.check_groups(self._wrapped.config["groups"], specs)
        return specs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError. Called by copy.copy, copy.deepcopy, pickle and torch.save."""
        raise TypeError(
            "an optimizer that strata.wrap() returned cannot be copied or pickled, for its state "
            "rests in the pages of one model: copy optimizer.state_dict(), or write both with "
            "strata.save(model, path)"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: the pages of the optimizer's state were laid out by wrap()."""
        raise RuntimeError("parameter groups cannot be added after strata.wrap()")

    def state_dict(self) -> dict[str, Any]:
        """As torch's: moments and steps, all in memory at once; strata.save streams them."""
        self._wrapped.hooks.reset()
        self._wrapped.refuse_half_step("state_dict() of the optimizer")
        self._wrapped.synchronize()
        index: dict[int, int] = {}
        groups = []
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                index.setdefault(id(parameter), len(index))
            packed["params"] = [index[id(p)] for p in group["params"]]
            groups.append(packed)
        entries = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if entry := self._read_state(parameter, group):
                    entries[index[id(parameter)]] = entry
        return {"state": entries, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict()` of this or of the plain torch optimizer returned. Raises
        ValueError, and changes nothing, where that is of another model or optimizer, is damaged, or
        has options that cannot be followed."""
        self._wrapped.hooks.reset()
        self._wrapped.refuse_half_step("load_state_dict()")
        groups = saved_groups(state_dict, self.param_groups)
        merged = [self._merged(g, new) for g, new in zip(self.param_groups, groups, strict=True)]
        specs = self.group_specs(merged)
        saved = saved_entries(state_dict, groups)
        entries = [
            (parameter, g, saved.get(number, {}))
            for g, group in enumerate(self.param_groups)
            for parameter, number in zip(group["params"], groups[g]["params"], strict=True)
        ]
        for parameter, g, entry in entries:
            self._check_state(parameter, merged[g], specs[g], entry)
        for group, new in zip(self.param_groups, merged, strict=True):
            group.update(new)
        for parameter, g, entry in entries:
            self._write_state(parameter, self.param_groups[g], entry)

    def _merged(self, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The group with the saved options in place of its own."""
        merged = {**group, **saved, "params": group["params"]}
        if isinstance(self._inner, torch.optim.AdamW):
            merged["decoupled_weight_decay"] = True  # as AdamW does, for states of Adam
        return merged

    def _kinds(self, index: int) -> list[tuple[Kind, str]]:
        """The moments that are kept of a parameter, whatever its group's options are now."""
        config = self._wrapped.config
        group = config["params"][index]["group"]
        kinds = moments_of(config["groups"][group])
        if self._foreign is None:
            return kinds
        names = self._kept[group].moments
        return [(kind, name) for (kind, _), name in zip(kinds, names, strict=True)]

    def _read_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self._wrapped
        index = state.index_of(parameter)
        step = state.session.param_step(index)
        if step == 0 or not state.config["params"][index]["trainable"]:
            return {}
        entry: dict[str, Any] = {"step": torch.tensor(float(step), device="cpu")}
        if self._foreign is not None:
            entry = self._foreign.scalars(index, step, group)
        for kind, name in self._kinds(index):
            entry[name] = state.read(index, kind)
        return entry

    def _check_state(
        self, parameter: torch.Tensor, group: dict[str, Any], spec: GroupSpec, entry: dict[str, Any]
    ) -> None:
        """Raises ValueError for what cannot be taken over. `group`, `spec`: as they are to be."""
        state = self._wrapped
        index = state.index_of(parameter)
        if not state.config["params"][index]["trainable"]:
            return  # nothing is kept of it
        kept = self._foreign.kept(group) if self._foreign is not None else None
        check_entry(
            state.names[index],
            entry,
            parameter.shape,
            moments=[name for _, name in self._kinds(index)],
            needed=kept.moments if kept else [name for _, name in moments_of(spec)],
            counted="step" in kept.scalars if kept else spec["rule"] in COUNTED,
            scalars=[name for name in kept.scalars if name in entry] if kept else [],
        )
        initial, sums = self._inner.defaults.get("initial_accumulator_value"), entry.get("sum")
        if sums is not None and not entry.get("step", 1) and (sums != initial).any():
            raise ValueError(
                f"the state of {state.names[index]!r} is from before its first step, and its sums "
                f"are not the {initial} that this Adagrad was built with"
            )

    def _write_state(
        self, parameter: torch.Tensor, group: dict[str, Any], entry: dict[str, Any]
    ) -> None:
        state = self._wrapped
        index = state.index_of(parameter)
        if not state.config["params"][index]["trainable"]:
            return
        moments = [(kind, entry.get(name)) for kind, name in self._kinds(index)]
        for kind, value in moments:
            if value is None:
                value = torch.zeros(parameter.shape, device="cpu")
            state.write(index, value, kind)
        # torch's SGD keeps no step; a momentum buffer says that there was one.
        started = any(value is not None for _, value in moments)
        step = int(entry.get("step", started))
        state.session.set_param_step(index, step)
        if self._foreign is not None:
            self._foreign.set_scalars(index, step, entry, group)


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
