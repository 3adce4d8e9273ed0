"""The state of an optimizer in pages: what there is of each parameter, and what may replace it.

    pages = StatePages(state, inner, foreign, kept, groups, specs)
    pages.shown(index)                # {"step": ..., "exp_avg": ...}: tensors without memory
    pages.replace({index: {}})        # it begins anew with the next step

optimizer_state.py makes of it what users see. Use from the thread that trains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, WeakValueDictionary

import torch

from .._optim.foreign import Foreign
from .._optim.foreign_probe import Kept as KeptByClass
from .._optim.groups import COUNTED, moments_of
from .loaded_state import check_entry
from .optimizer_state import (
    Kept,
    ParameterState,
    StateTensor,
    is_there,
    wait_for_updates,
    without_others,
)
from .stand_in import make
from .wrapped import Wrapped

if TYPE_CHECKING:
    from .._core import GroupSpec, Kind

Group = dict[str, Any]


class StatePages:
    """Of one optimizer."""

    def __init__(
        self,
        state: Wrapped,
        inner: torch.optim.Optimizer,
        foreign: Foreign | None,
        kept: Sequence[KeptByClass],
        groups: Callable[[], list[Group]],
        specs: Callable[[], list[GroupSpec]],
    ) -> None:
        """`kept`: what was laid out for each group of a class without a kernel. `groups` and
        `specs`: the parameter groups and the hyperparameters of all of them, now."""
        self.wrapped = state
        self._inner, self._foreign, self._kept, self._specs = inner, foreign, kept, specs
        self._groups = groups
        # By parameter: what users hold. See Note [Held] in optimizer_state.py.
        self._entries: WeakValueDictionary[int, ParameterState] = WeakValueDictionary()
        self._tensors: defaultdict[int, WeakSet[Kept]] = defaultdict(WeakSet)
        self._at_zero: set[int] = set()  # parameters with a state whose step is 0

    def group_of(self, index: int) -> int:
        """The number of the parameter's group."""
        return self.wrapped.config["params"][index]["group"]

    def members(self) -> dict[torch.Tensor, int]:
        """The parameters that may have a state, in the order of groups, and their indices."""
        return {
            parameter: self.wrapped.index_of(parameter)
            for group in self._groups()
            for parameter in group["params"]
        }

    def has_state(self, index: int) -> bool:
        """Whether there is anything of a parameter, as there is from its first step on."""
        return self.wrapped.session.param_step(index) != 0 or index in self._at_zero

    def entry(self, index: int) -> ParameterState:
        """What there is of a parameter, as a mapping: the same one while somebody holds it."""
        found = self._entries.get(index)
        if found is None:
            found = self._entries[index] = ParameterState(self, index)
        return found

    def shown(self, index: int, live: bool = True) -> dict[str, Any]:
        """What there is of a parameter: nothing ahead of its first step. `live`: what is changed in
        place is written back; else it becomes a copy."""
        state = self.wrapped
        group = self._groups()[self.group_of(index)]
        if not self.has_state(index) or not state.config["params"][index]["trainable"]:
            return {}
        shape = state.aliases[index].shape
        numbers = self._numbers(index, group)
        found = [
            (name, now.shape, now.dtype, partial(self._number, index, group, name))
            for name, now in numbers.items()
            if torch.is_tensor(now)
        ] + [
            (name, shape, torch.float32, partial(state.read, index, kind))
            for kind, name in self._kinds(index)
        ]
        kept = [Kept(self, index, *each, live=live) for each in found]
        self._tensors[index].update(kept)
        return numbers | {each.name: make(StateTensor, each) for each in kept}

    def replace(self, entries: Mapping[int, Any]) -> None:
        """Takes over the states of parameters; one that is empty begins anew. Raises ValueError,
        and changes nothing, where one is none that the class keeps."""
        others = {i: given for i, given in entries.items() if given is not self._entries.get(i)}
        for index, entry in self._taken(others).items():
            self.write(index, entry)

    def change(self, index: int, entries: dict[str, Any]) -> None:
        """The parameter's entry has these tensors from here on. Raises as replace() does."""
        entry = self._taken({index: entries})[index]
        self._keep_tensors(index, entry)
        self._write(index, entry)

    def write_tensor(self, index: int, name: str, values: torch.Tensor) -> None:
        """A tensor of the parameter was changed in place. Raises as replace() does."""
        self._write(index, self._taken({index: self.shown(index) | {name: values}})[index])

    def _taken(self, entries: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        """What is to be written of each parameter."""
        state = self.wrapped
        wait_for_updates(state)
        if state.ranks is not None:
            raise RuntimeError(
                "with several ranks optimizer.state is read alone, for each rank has a part of it: "
                "change a copy, copy.deepcopy(optimizer.state_dict()), and give it to "
                "optimizer.load_state_dict() on all ranks"
            )
        specs = self._specs()
        taken = {}
        for index, given in entries.items():
            g = self.group_of(index)
            entry = without_others(given, state, index)
            if entry and not state.config["params"][index]["trainable"]:
                raise ValueError(f"{state.names[index]!r} is not trained: it has no state")
            self._check_names(index, g, entry)
            entry = {} if self._begins_anew(index, specs[g], entry) else entry
            self.check(index, self._groups()[g], specs[g], entry)
            taken[index] = entry
        return taken

    def _keep_tensors(self, index: int, entry: Mapping[str, Any]) -> None:
        """What somebody holds of the tensors that `entry` replaces stays what it is."""
        for kept in list(self._tensors.get(index, ()) if self.has_state(index) else ()):
            if not is_there(entry.get(kept.name), self.wrapped, index, kept.name):
                kept.keep()

    def _begins_anew(self, index: int, spec: GroupSpec, entry: Any) -> bool:
        """Whether a state has lost what a class keeps that counts no steps: SGD its momentum."""
        kinds = self._kinds(index)
        counted = self._foreign is not None or spec["rule"] in COUNTED
        if counted or not kinds or not isinstance(entry, Mapping):
            return False
        return all(entry.get(name) is None for _, name in kinds)

    def _check_names(self, index: int, g: int, entry: Any) -> None:
        """Raises ValueError where there is something that the class does not keep."""
        known = {"step"} | {name for _, name in self._kinds(index)}
        if self._foreign is not None:
            known |= set(self._foreign.kept(self._groups()[g]).scalars)
        for name in entry if isinstance(entry, Mapping) else ():
            if name not in known:
                raise ValueError(
                    f"{name!r} of {self.wrapped.names[index]!r} is nothing that "
                    f"{type(self._inner).__name__} keeps, so strata has no room for it "
                    f"({', '.join(sorted(known))}): keep it in a dictionary of your own"
                )

    def _numbers(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a parameter beside its moments, as it is now."""
        step = self.wrapped.session.param_step(index)
        if self._foreign is not None:
            return self._foreign.scalars(index, step, group)
        return {"step": torch.tensor(float(step), device="cpu")}

    def _number(self, index: int, group: dict[str, Any], name: str) -> torch.Tensor:
        return cast(torch.Tensor, self._numbers(index, group)[name])

    def _kinds(self, index: int) -> list[tuple[Kind, str]]:
        """The moments that are kept of a parameter, whatever its group's options are now."""
        config = self.wrapped.config
        group = config["params"][index]["group"]
        kinds = moments_of(config["groups"][group])
        if self._foreign is None:
            return kinds
        names = self._kept[group].moments
        return [(kind, name) for (kind, _), name in zip(kinds, names, strict=True)]

    def check(
        self, index: int, group: dict[str, Any], spec: GroupSpec, entry: dict[str, Any]
    ) -> None:
        """Raises ValueError for what cannot be taken over. `group`, `spec`: as they are to be."""
        state = self.wrapped
        kept = self._foreign.kept(group) if self._foreign is not None else None
        check_entry(
            state.names[index],
            entry,
            state.aliases[index].shape,
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

    def write(self, index: int, entry: dict[str, Any]) -> None:
        """The parameter has this state from here on, instead of the one that it had."""
        if self.has_state(index):
            held = self._entries.pop(index, None)
            if held is not None:
                held.keep()
        self._keep_tensors(index, entry)
        self._write(index, entry)

    def _write(self, index: int, entry: dict[str, Any]) -> None:
        state = self.wrapped
        if not entry and not self.has_state(index):
            return  # as it began, it is nowhere
        kinds = self._kinds(index)
        for kind, name in kinds:
            value = entry.get(name)
            if is_there(value, state, index, name):
                continue
            if value is None:
                value = torch.zeros(state.aliases[index].shape, device="cpu")
            state.write(index, value, kind)
        # torch's SGD keeps no step; a momentum buffer says that there was one.
        started = any(entry.get(name) is not None for _, name in kinds)
        step = int(entry.get("step", started))
        state.session.set_param_step(index, step)
        if step == 0 and any(value is not None for value in entry.values()):
            self._at_zero.add(index)
        else:
            self._at_zero.discard(index)
        if self._foreign is not None:
            group = self._groups()[self.group_of(index)]
            self._foreign.set_scalars(index, step, entry, group)
