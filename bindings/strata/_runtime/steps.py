"""The steps of one wrapped model, and what came of them.

    state.steps.note(result)           # after the core's step
    recorded = state.steps.end()       # what was recorded of it

Use from the thread that trains; autograd's own threads come here through hooks, under the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._profiling.timeline import UseSpan
from .._profiling.uses import RecordedStep
from .._torch_compat import DisableTorchFunction, graph_task
from .real_grads import drop_real

if TYPE_CHECKING:
    from .._core import GroupSpec, StepResult
    from .wrapped import Wrapped


class Steps:
    """Of one wrapped model."""

    def __init__(self, state: Wrapped) -> None:
        """Of a state that has its session, and its parameters."""
        self._state = state
        # in_backward: what the updates of this backward use; None where none has begun.
        self.groups_used: list[GroupSpec] | None = None
        self.last: StepResult | None = None
        self.count = 0  # of the core's that are noted here
        self.nonfinite = self.skipped = 0
        self._backward: int | None = None  # autograd's number of the one that landed a gradient

    def note(self, result: StepResult) -> None:
        """Counts a step, and marks what it changes as changed for the graphs that saved it."""
        self.last = result
        self.nonfinite += not result["finite"]
        self.skipped += result["skipped"]
        self._note(changes=not result["skipped"])

    def _note(self, changes: bool) -> None:
        landed = self._state.session.last_params()
        if changes:
            self._note_change(landed)
        self._state.gradients.end_step(landed)
        self._note_no_gradients()
        self.count = self._state.session.steps()

    def _note_change(self, changed: list[int]) -> None:
        with DisableTorchFunction():
            torch.autograd.graph.increment_version([self._state.params[i] for i in changed])
            for i in changed:
                self._state.written[i] = self._state.params[i]._version

    def _note_no_gradients(self) -> None:
        self.groups_used = None
        for unit in self._state.units:
            unit.completes = False

    def learn_outcome(self) -> None:
        """After an exception: learns from the core what happened. REQUIRES: no backward runs, and
        no other thread is in step()."""
        self._state.landings.wait()
        self._drop_real_gradients()
        if self._state.session.steps() != self.count:
            self._note(changes=True)
        if not self._state.session.in_half_step():
            self.groups_used = None

    def forget(self) -> None:
        """Ahead of strata.load() writing all parameters, which are of no one step then: forgets
        gradients and what they were used for. The state is half loaded until that has ended."""
        if self._state.ranks is not None:
            self.drop_gradients(wanted=True)
        self._state.half_loaded = True
        self._state.landings.wait()
        self._drop_real_gradients()
        self._state.session.forget_step()
        self._note_change(list(range(len(self._state.params))))
        self._note_no_gradients()
        self._state.gradients.forget()

    def end_load(self) -> None:
        """Behind forget(): strata.load() has written everything, on all ranks."""
        self._state.session.end_load()
        self._state.half_loaded = False

    def end(self, predicted_seconds: float | None = None, plan: int = 0) -> RecordedStep:
        """What was recorded of the step that has ended. The log keeps of it what reports tell."""
        self._backward = None
        step = self._state.recorder.take()
        if step.uses:
            # Of several rounds the recorder tells the last one only.
            begin = step.begin if step.rounds == 1 else None
            uses = map(UseSpan.of, step.uses)
            self._state.log.end_step(begin, step.end, uses, predicted_seconds, plan)
        return step

    def note_backward(self) -> None:
        """Called by autograd ahead of a gradient. Ranks add up theirs backward by backward: a new
        one begins, also where the last was given up. One that a checkpoint runs in another is part
        of that."""
        if self._state.ranks is None:
            return
        task = self._state.visits.outermost(graph_task())
        if self._backward != task:
            self._state.gradients.drops.settle()
        if self._backward not in (None, task):
            self._begin_window()
        self._backward = task

    def end_backward(self) -> None:
        """The last backward that was running is over: ranks wait for nothing more of it."""
        if self._state.ranks is not None:
            self._state.gradients.drops.settle()
            self._begin_window()
            self._backward = None

    def _begin_window(self) -> None:
        """Behind the gradients of the last backward, some of which may still be on their way."""
        session = self._state.session
        self._state.landings.put(lambda _: session.begin_window())

    def look_at_gradients(self, wanted: bool = False) -> None:
        """Ahead of an answer of p.grad: ranks add up what has landed of all of them. In a backward
        there is nothing to see yet. `wanted`: also where nothing has landed of this one."""
        if self._state.ranks is None or graph_task() != -1:
            return
        self._state.landings.wait()
        if self._state.session.look_at_gradients(wanted):
            self._state.gradients.totals.forget_all()

    def drop_gradients(self, wanted: bool = False) -> None:
        """Forgets what has landed since the last step. `wanted`: all ranks meet for it, also those
        that have nothing."""
        self._state.landings.wait()
        self._drop_real_gradients()
        self._state.session.drop_gradients(wanted)
        self._state.gradients.drops.forget()

    def _drop_real_gradients(self) -> None:
        """Those that autograd completed, and no hook took to the core: an exception came first."""
        for index, parameter in enumerate(self._state.params):
            if not self._state.gradients.is_own(index):
                drop_real(parameter)
