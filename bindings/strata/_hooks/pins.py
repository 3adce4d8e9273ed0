"""Which units stay entered during a backward, and until when.

    pins.pin(unit)        # the autograd node now running has unpacked one of its parameters
    pins.hold(unit)       # until its gradients have landed or the backward is over
    pins.run_again(unit)  # a user's checkpoint computes it for the node now running
    pins.land(index)      # the gradient of a parameter is complete
    pins.make_way(unit)   # in_backward: gradients of other units give up their frames

A node uses what it unpacked until the next node runs. So a pin belongs to the node now running, and
goes when another node asks for a unit of another module, or when all gradients of the unit have
landed. Where some of the unit is frozen, that is not the end of its use: the frozen layer beside an
adapter is read when the adapter's gradients are there. Then it goes, also where it was held, when
another node asks for a unit of another module, or has one computed again. What is left goes at the
end of the backward; after a backward that raised, at reset().

With update="in_backward" a unit whose last gradient has landed is updated at once, and one of which
some parameters got no gradient at the end of the backward.

Note [Hooks within a unit]. A user's saved-tensor hooks within a unit lie above ours: autograd calls
only those, and torch tells nobody of them. They are given parameters and views of parameters.
Where they keep one without a copy, autograd later reads its raw memory, which is right only while
the unit is entered. So where somebody new refers to a parameter, or to its memory, behind a
forward, the unit is entered from when backward comes to what the module returned until its
gradients have landed. A reference that is there for another reason costs no more than that. Limits:
hooks that keep a name, and look the parameter up in a table of their own; parts of the forward that
backward reaches otherwise than through what the module returned.

Autograd's threads call this under the GIL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from .._activations.arguments import tensors_in
from .._activations.swapping import Swapping
from .._errors import StrataError
from .._runtime.optimizer import clips_units, complete_unit, current_groups
from .._runtime.unit import Unit
from .._runtime.visits import Visit
from .._runtime.wrapped import Wrapped
from .._torch_compat import DisableTorchFunction, current_node, graph_task, use_count, will_run


class _Pin(Visit):
    """A unit that stays entered because an autograd node unpacked one of its parameters.

    node: that node's number among those that its thread made, -1 outside a backward. The node
        itself would keep the graph, which keeps the model: a backward that raises would leave both
        for ever.
    """

    __slots__ = ("node", "unit")

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        node = current_node()
        self.node: int = -1 if node is None else node._sequence_nr()

    def is_past(self, now: _Pin) -> bool:
        """Whether another node of the same backward runs now, so that this one's is done. One that
        reads a unit of the same module may come back to this one's."""
        if self.unit.index in now.unit.together:
            return False
        return self.task == now.task and self.thread == now.thread and self.node != now.node


class Pins:
    """The units of one model that are entered on account of a backward."""

    def __init__(self, state: Wrapped, swapping: Swapping) -> None:
        self._state = state
        self._swapping = swapping
        self._pins: list[_Pin] = []  # one per unit and backward
        self._held: list[_Pin] = []  # one per unit
        self._completes = state.config["update"] == "in_backward"
        # By parameter: units that await its gradient, though it is in none of them.
        self._readers: dict[int, list[Unit]] = {}

    def note_reader(self, unit: Unit, indices: Sequence[int]) -> None:
        """A module whose own unit this is reads these parameters. Call ahead of all else."""
        if unit.trainable:
            return
        for index in indices:
            if self._state.config["params"][index]["trainable"] and index not in unit.awaited:
                unit.awaited.append(index)
                self._readers.setdefault(index, []).append(unit)
        unit.expected = len(unit.awaited)

    def pin(self, unit: Unit) -> None:
        """Enters the unit for the node now running."""
        now = _Pin(unit)
        self._release_past(now)
        for pin in self._pins:
            if pin.unit is unit and pin.task == now.task:
                pin.node, pin.thread = now.node, now.thread
                return
        self.watch()
        self._swapping.arrive(unit)
        self._state.enter(unit, self._state.visits.add(now), backward=True)
        self._pins.append(now)

    def hold(self, unit: Unit) -> None:
        """Enters the unit until its gradients have landed or the backward is over."""
        if not any(pin.unit is unit for pin in self._held):
            self.watch()
            pin = _Pin(unit)
            self._release_past(pin)
            self._state.enter(unit, self._state.visits.add(pin), backward=True)
            self._held.append(pin)

    def run_again(self, unit: Unit) -> None:
        """The module of the unit is about to compute again, for the node now running."""
        self.watch()  # ahead of a backward that a checkpoint runs in this one
        self._release_past(_Pin(unit))

    def land(self, index: int) -> None:
        """Notes that the gradient of a parameter is complete."""
        self.watch()
        for unit in (self._state.unit_of[index], *self._readers.get(index, ())):
            if unit.landed == 0 and (self._completes or self._held):
                unit.expected = self._count_expected(unit)
            unit.landed += 1
            if unit.landed != unit.expected:
                continue
            if unit.trainable == len(unit.params):
                for pins in (self._pins, self._held):
                    self._release(pins, [pin for pin in pins if pin.unit is unit])
            if self._completes and unit.trainable:
                self._complete(unit)

    def make_way(self, unit: Unit) -> None:
        """Updates the other units with what has landed on them, though more may come.

        REQUIRES: update="in_backward", and a landing of `unit` has its turn. Each element is
        updated on its own, so the result is the same. Raises StrataError where all gradients of a
        unit are needed first, to clip them.
        """
        others = {u: self._landed(u) for u in self._state.units if u is not unit}
        partly = [u for u, landed in others.items() if 0 < landed < u.expected]
        if partly and clips_units(self._state):
            names = ", ".join(u.name for u in partly)
            raise StrataError(
                f"gradients of {unit.name} find no room in host memory beside those of {names}, "
                "which wait for the rest of theirs because max_unit_norm clips them together: give "
                "more host memory, or wrap with update='on_step'"
            )
        for other, landed in others.items():
            if landed:
                complete_unit(self._state, other)

    def watch(self) -> None:
        """Has end() called when the backward now running is over, once."""
        self._state.visits.watch(self.end)

    def end(self, task: int) -> None:
        """Called by autograd when the backward has run all its nodes."""
        self._release(self._pins, [pin for pin in self._pins if pin.task == task])
        if self._state.visits.is_last(task):
            self._release(self._held, list(self._held))
            if self._completes:
                self._complete_rest()
            self._forget_landings()
            self._swapping.end()
            self._state.steps.end_backward()
        self._state.visits.end_backward(task)

    def reset(self, live: list[int]) -> None:
        """Forgets the pins of backwards that raised. `live`: numbers of other visits."""
        self._pins[:] = [pin for pin in self._pins if pin.number in live]
        self._held[:] = [pin for pin in self._held if pin.number in live]
        if not self._state.visits.in_backward:
            self._forget_landings()

    def _release_past(self, now: _Pin) -> None:
        """What nodes before this one have asked for; of what is held, only that whose gradients
        have landed."""
        past = [pin for pin in self._pins if pin.unit is not now.unit and pin.is_past(now)]
        self._release(self._pins, past)
        over = [p for p in self._held if p.is_past(now) and 0 < p.unit.expected == p.unit.landed]
        self._release(self._held, over)

    def _release(self, pins: list[_Pin], past: list[_Pin]) -> None:
        for pin in past:
            pins.remove(pin)
            self._state.leave(pin.unit, pin)
            self._state.visits.end(pin)

    def _count_expected(self, unit: Unit) -> int:
        """Of how many parameters the backward now running will complete the gradient."""
        if not self._state.visits.is_last(graph_task()):
            return len(unit.awaited)  # a backward within another one sees its own nodes only
        params = [self._state.params[i] for i in unit.awaited]
        with DisableTorchFunction():
            return sum(p.requires_grad and will_run(get_gradient_edge(p).node) for p in params)

    def _complete_rest(self) -> None:
        """Units of which some gradients were expected, and turned out to be none."""
        for unit in self._state.units:
            if unit.trainable and 0 < unit.landed < unit.expected:
                self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Has the unit updated as soon as its gradients are in their pages."""
        current_groups(self._state)  # as they are now
        unit.completes = True
        self._state.landings.put(lambda _: complete_unit(self._state, unit))

    def _landed(self, unit: Unit) -> int:
        """How many gradients of the unit are in their pages; autograd may have shown more."""
        count = self._state.session.gradient_count
        return sum(count(param) > 0 for param in unit.params)

    def _forget_landings(self) -> None:
        for unit in self._state.units:
            unit.landed = 0
            unit.expected = len(unit.awaited)


def _counts_for_python() -> bool:
    """Whether C++ that refers to a tensor counts, once, as a reference to the Python object."""
    tensor = torch.empty(1)
    before = sys.getrefcount(tensor)
    view = tensor[:]
    return sys.getrefcount(tensor) > before and view._base is not None


COUNTS_FOR_PYTHON = _counts_for_python()


def references(params: Sequence[nn.Parameter]) -> int:
    """A number that grows with how often Python objects refer to the parameters. REQUIRES: they are
    plain ones."""
    count = sum(map(sys.getrefcount, params))
    if COUNTS_FOR_PYTHON:
        count -= sum(map((1).__lt__, map(use_count, params)))
    return count


@dataclass(slots=True, eq=False)
class Hold:
    """Enters units for nodes that read their memory without asking."""

    _pins: Pins
    _units: Sequence[Unit]

    def __call__(self, grads: Any) -> None:
        """Called by autograd ahead of the node that made what a module returned."""
        for unit in self._units:
            self._pins.hold(unit)


def hold(output: Any, pins: Pins, units: Sequence[Unit]) -> None:
    """See Note [Hooks within a unit]. `output`: of the module."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(Hold(pins, units))
