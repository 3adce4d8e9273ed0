"""Which units stay entered during a backward, and until when.

    pins.pin(unit)       # the autograd node now running has unpacked one of its parameters
    pins.hold(unit)      # until its gradients have landed or the backward is over
    pins.land(unit)      # one of its gradients is complete
    pins.make_way(unit)  # in_backward: gradients of other units give up their frames

A node uses what it unpacked until the next node runs. So a pin belongs to the node now running, and
goes when another node asks for another unit, or when all gradients of the unit have landed. What is
left goes at the end of the backward; after a backward that raised, at reset().

With update="in_backward" a unit whose last gradient has landed is updated at once, and one of which
some parameters got no gradient at the end of the backward.

Autograd's threads call this under the GIL.
"""

import threading
from typing import Any

import torch
from torch.autograd import Variable

from .errors import StrataError
from .optimizer import clips_units, complete_unit, current_groups
from .swapping import Swapping
from .wrapped import Unit, Wrapped

_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node


class _Pin:
    """A unit that stays entered because autograd node `node` unpacked one of its parameters."""

    __slots__ = ("node", "task", "thread", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.node: Any = _current_node()
        self.task = _graph_task()
        self.thread = threading.get_ident()

    def is_past(self, now: "_Pin") -> bool:
        """Whether another node of the same backward runs now, so that this one's is done."""
        return self.task == now.task and self.thread == now.thread and self.node is not now.node


class Pins:
    """The units of one model that are entered on account of a backward."""

    def __init__(self, state: Wrapped, swapping: Swapping) -> None:
        self._state = state
        self._swapping = swapping
        self._pins: list[_Pin] = []  # one per unit and backward
        self._held: list[Unit] = []
        self._tasks: set[int] = set()  # backwards whose end we are told of
        self._completes = state.config["update"] == "in_backward"

    def pin(self, unit: Unit) -> None:
        """Enters the unit for the node now running."""
        now = _Pin(unit)
        place = -1
        past = []
        for i, pin in enumerate(self._pins):
            if pin.unit is unit and pin.task == now.task:
                place = i
            elif pin.is_past(now):
                past.append(pin)
        if place >= 0:
            self._pins[place] = now
            self._release(past)
            return
        self._release(past)
        self._swapping.arrive(unit)
        self._state.enter(unit, backward=True)
        self._pins.append(now)
        self.watch()

    def hold(self, unit: Unit) -> None:
        """Enters the unit until its gradients have landed or the backward is over."""
        if unit not in self._held:
            self._state.enter(unit, backward=True)
            self._held.append(unit)
            self.watch()

    def land(self, unit: Unit) -> None:
        """Notes that one gradient of the unit is complete."""
        self.watch()
        unit.landed += 1
        if unit.landed == unit.trainable:
            self._release([pin for pin in self._pins if pin.unit is unit])
            if unit in self._held:
                self._release_held([unit])
            if self._completes:
                self._complete(unit)

    def make_way(self, unit: Unit) -> None:
        """Updates the other units with what has landed on them, though more may come.

        REQUIRES: update="in_backward", and a landing of `unit` has its turn. Each element is
        updated on its own, so the result is the same. Raises StrataError where all gradients of a
        unit are needed first, to clip them.
        """
        others = {u: self._landed(u) for u in self._state.units if u is not unit}
        partly = [u for u, landed in others.items() if 0 < landed < u.trainable]
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
        """Asks to be told of the end of the backward now running, once."""
        task = _graph_task()
        if task != -1 and task not in self._tasks:
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: self.end(task))

    def end(self, task: int) -> None:
        """Called by autograd when the backward has run all its nodes."""
        self._tasks.discard(task)
        self._release([pin for pin in self._pins if pin.task == task])
        if not self._tasks:
            self._release_held(list(self._held))
            if self._completes:
                self._complete_rest()
            self._forget_landings()
            self._swapping.end()

    def reset(self) -> None:
        """Drops what a backward that raised has left behind."""
        if self._pins or self._held or self._tasks:
            self._release(list(self._pins))
            self._release_held(list(self._held))
            self._tasks.clear()
            self._forget_landings()
            self._swapping.end()

    def _release(self, pins: list[_Pin]) -> None:
        for pin in pins:
            self._pins.remove(pin)
            self._state.leave(pin.unit)

    def _release_held(self, units: list[Unit]) -> None:
        for unit in units:
            self._held.remove(unit)
            self._state.leave(unit)

    def _complete_rest(self) -> None:
        """Units of which some parameters took no part."""
        for unit in self._state.units:
            if 0 < unit.landed < unit.trainable:
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
