"""Plans a wrapped model's steps and carries the plans out: when to record, when to plan anew, which
plan holds for which shape of batch.

    state.planning = Planning(state, Goal(...))
    state.planning.begin_forward(args, kwargs)     # the model's forward is called
    state.planning.end_step()                      # behind optimizer.step()

The first step with a batch of an unseen shape is recorded as it runs. Units keep their activations
where an estimate says that there is room for all of them, and compute them again elsewhere
(recording.py); budgets that cannot work are refused at its end. The next two show how long
computation takes when nothing disturbs it: they wait for the updates of the step before, and
nothing is recorded but times. Then the plan is made. In the first step under it PyTorch's memory is
measured again, if the budget is tight: where it is more than was planned, the plan is made anew
with that much less. Use from the thread that trains.

Note [Shape classes]. A plan made for one batch serves every batch that is nowhere larger: its
promises still hold. A batch that is larger somewhere, or has less than half the elements, gets a
plan of its own. A step of several batches has one plan, that of the largest: the recorder tells
that round alone. Where such a batch came for the first time in the middle of a step, the next step
is recorded for it, even if that begins with a smaller one. What is claimed for plans (frames, room
for swapped tensors) only ever changes one way, so batches of many lengths do not make it swing to
and fro.

Note [Units on the device]. What is left of the device may hold whole units, states included. They
move there and back between two steps, which takes as long as a few steps: so all plans want the
same ones there, and only a batch larger than any before brings them back, since nobody knows yet
what it leaves.

Note [Other threads]. While another thread is in a forward or backward of the model nothing can be
claimed: see claims.py. The plan then waits: units go on as they were, and the next forward that a
step is made of tries again.

Note [Slices]. Keeping, swapping and recomputing give the same bits, so measured times may choose
between them. Slices change the shapes of matrix products, and with them the last bits: a batch is
cut only where nothing else fits, into the fewest slices that do, so that a run can be repeated.
What can be cut is found by trials that take time and memory, so they are left until then.

Note [Ranks]. Each rank plans for itself, from its own steps and clocks, so plans of ranks differ,
and no rank waits for another's. That may change no bits: what depends on a plan are only modes of
activations and the order of uploads. Batches are cut by `split=` alone, which is the same on all
ranks; a step that fits on slices only is refused. Units stay off the device: all ranks upload them.

Note [Shards]. The forward of a module whose parameters are shards talks to other processes, which
must run the same ones as often. Plans differ, so none chooses to compute a unit again: activations
are kept, or swapped. `activations="recompute"` does so in all processes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from .._activations.arguments import tensors_in
from .._config import machine
from .._config.choices import FORCED
from .._config.sizes import format_size
from .._errors import StrataError
from .._profiling import calibrate
from .._profiling.allocator import Allocator
from .._report.report_text import like, plan_line
from .claims import Claims
from .fitting import advice
from .limits import Setting, limiting_sentence
from .recording import Recording
from .second_runs import SecondRuns
from .shape_class import Following, Goal, Shape, ShapeClass, find_class, on_device
from .trace_of import make_trace, note_times, uses_of

if TYPE_CHECKING:
    from .._core import Bound, Costs, Simulation, StepPlan, Trace
    from .._profiling.windows import Judged, Window
    from .._runtime.wrapped import Wrapped

TIMED_STEPS = 2  # the first one still warms up
SLOW_FACTOR = 1.5  # of the predicted time: is it the disk?

log = logging.getLogger("strata")


class Planning:
    """The plans of one wrapped model."""

    def __init__(self, state: Wrapped, goal: Goal) -> None:
        self.state = state
        self.goal = goal
        self.following = Following()
        self.classes: list[ShapeClass] = []
        self.current: ShapeClass | None = None
        self._in_use: ShapeClass | None = None  # whose plan the units have, whole
        self._on_device: list[bool] | None = None  # what plans rest there; None: they may choose
        self._slow_windows = 0
        self._slow_windows_max = 1  # before the disk is measured anew: each time it takes seconds
        self._mixed = False  # batches of two classes in one step: its times say little
        self._due: ShapeClass | None = None  # its first batch came in the middle of a step
        state.may_split = goal.split is not None
        self.allocator = Allocator(state.device, goal.device_bytes)
        self.allocator.give_pages(goal.param_bytes)
        self.claims = Claims(state, self.allocator, goal.param_bytes)
        if state.shards is not None and goal.activations != "recompute":
            for unit in state.units:  # see Note [Shards]
                unit.may_recompute = False
        self.recording = Recording(state, goal, lambda: self.allocator.page_bytes)
        self._tried_slices = False  # in the step that was recorded
        self.second_runs = SecondRuns(state.units)

    @property
    def trace(self) -> Trace | None:
        """What the plan in use was made from."""
        return self.current.trace if self.current else None

    @property
    def plan(self) -> StepPlan | None:
        """The plan in use."""
        return self.current.plan if self.current else None

    @property
    def simulation(self) -> Simulation | None:
        """The step as the plan in use predicts it."""
        paper = self.current.paper if self.current else None
        return paper.simulate(None, True) if paper else None

    @property
    def bound(self) -> Bound | None:
        """What no plan could be faster than."""
        found = self.current
        return self.following.bound(found) if found and found.paper else None

    @property
    def judged(self) -> Judged | None:
        """How long steps take under the plan in use, over windows of seconds."""
        return self.current.windows.judged if self.current else None

    @property
    def limited(self) -> str:
        """What limits a step, in a sentence; empty: there is no plan."""
        if self.current is None or self.current.paper is None:
            return ""
        setting = Setting.of(self.state.config, machine.processors())
        return limiting_sentence(self.current.paper, self.following.known(), setting)

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Chooses the plan for a batch. Called ahead of every forward of the whole model."""
        if not torch.is_grad_enabled():
            return
        shape: Shape = tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))
        in_step = self.state.recorder.in_step
        before = self.current if in_step else self._due
        found, self.classes = find_class(self.classes, shape, before)
        if in_step and before is not None and found is not before:
            self._mixed = True
            if found.serves(before.shape):
                found.smallest = min(found.smallest, before.elements)
        self.current = found
        if found.paper is None:
            self._observe(found, list(tensors_in((args, kwargs))))
        elif found is not self._in_use:
            self._follow(found)
        if found.to_check:
            self._wait_for_lent_gradients()
            self.state.recorder.measure()
        self.state.recorder.note_batch(ShapeClass(shape).elements)

    def end_step(self) -> None:
        """Looks at the step that has ended, and plans. Called behind every optimizer.step().

        Raises StrataError where the budgets cannot work.
        """
        promise = self.current if self.current and self.current.paper else None
        step = self.state.steps.end(
            promise.predicted_seconds if promise else None,
            promise.number if promise else 0,
        )
        current, mixed = self.current, self._mixed
        self._mixed, self._due = False, None
        for found in self.second_runs.take_refused(self.classes):
            self._plan_class(found)
        if current is None or not step.uses or not step.has_backward:
            return
        current.rounds = step.rounds
        if current.trace is None and not step.detailed:
            self._due = current
        elif current.trace is None:
            self.recording.end()
            self.second_runs.tell()
            if self.recording.squeezed and self.recording.take_less():
                return
            trace = make_trace(step, self.state)
            try:
                self._plan_for(trace, 0)  # refused now, if it has to be
            except StrataError:  # recorded again, in less memory
                if not self._may_take_less():
                    raise
                return
            current.trace = trace
        elif current.paper is None:
            note_times(current.trace, step, first=current.timed == 0)
            current.timed += 1
            if current.timed == TIMED_STEPS:
                self._adopt(current)
        elif step.peak_bytes is not None:
            current.steady = True
            self._check_peak(current, step.peak_bytes)
        elif mixed:
            current.windows.interrupt()
        else:
            window = self.following.note(current, self.state.log.records[-1], step)
            if window is not None and step.rounds == 1:
                self._judge(current, window)

    def _may_take_less(self) -> bool:
        """Whether the step that was recorded did not fit, and may be recorded again: with units
        that are computed again, then with trials of what can be cut."""
        if self.recording.take_less():
            return True
        if not self._chooses_slices or self._tried_slices:
            return False
        self.state.may_split = True
        return True

    @property
    def _chooses_slices(self) -> bool:
        return self.goal.alone and self.goal.activations == "auto"

    def _wait_for_lent_gradients(self) -> None:
        """Waits for updates that read gradients where PyTorch left them: what is freed in a step
        that is measured would seem to be room there."""
        if self.state.device.type == "cpu" and not self.state.config["accumulate"]:
            self.state.session.drain()

    def _observe(self, found: ShapeClass, batch: list[torch.Tensor]) -> None:
        """Lets the step that begins be recorded, in as little memory as works, or timed as it was
        recorded."""
        if self.state.recorder.in_step:
            return  # another round of the step that is being recorded or timed
        known = [c.elements for c in self.classes if c.trace is not None]
        if self._on_device is not None and found.elements > max(known, default=0):
            if not self.claims.take_device(self.goal.param_bytes):
                return
            self._on_device = None
        self._in_use = None
        if found.trace is not None:
            for unit, traced in zip(self.state.units, found.trace.units, strict=True):
                unit.activation, unit.slices = traced.traced, traced.slices_traced
            self.state.synchronize()
            return
        self.recording.begin(batch, *self.claims.take_room(*self.recording.room(batch)))
        self._tried_slices = self.state.may_split
        self._wait_for_lent_gradients()
        self.state.recorder.begin()
        log.info("recording a step with a batch of %s", " ".join(map(str, found.shape)))

    def _plan_for(
        self, trace: Trace, reserve: int, device_bytes: int | None = None
    ) -> _core.PaperPlan:
        """See Note [Slices]. `device_bytes`: a budget, in the place of the one that there is.
        Raises StrataError where the budgets cannot work."""
        if self.following.costs is None:
            self.following.costs = self._measure()
        costs = self.following.known()
        device_bytes = self.goal.device_bytes if device_bytes is None else device_bytes
        budgets = self.state.session.step_budgets(max(0, device_bytes - reserve))
        wishes = _core.Wishes(
            activation=FORCED[self.goal.activations],
            slices=self.goal.split or 0,
            may_split=False,
            fewest_slices=self._chooses_slices,
            slices_min=self.recording.slices_min,
            on_device=self._on_device if self.goal.alone else [False] * len(trace.units),
        )
        paper = _core.PaperPlan(trace, costs, budgets, wishes)
        if self.goal.alone and self._on_device is not None and not paper.plan.feasible:
            paper = _core.PaperPlan(trace, costs, budgets, wishes.replace(on_device=None))
        plan = paper.plan
        if not plan.feasible:
            more = advice(self.state.model, plan, trace, budgets.device_bytes)
            raise StrataError(plan.refusal + more)
        return paper

    def _measure(self, refresh: bool = False) -> Costs:
        self.state.synchronize()  # updates of the step would be measured with it
        config, page_bytes = self.state.config, self.state.session.plan["page_bytes"]
        goal = self.goal
        setup = calibrate.Setup(
            goal.workers, page_bytes, config["ssd_paths"], goal.io_engine, device=config["device"]
        )
        costs = calibrate.costs(setup, refresh)
        # On the host autograd's thread lands gradients itself, see lander.py.
        return costs.replace(
            landing_waits=self.state.device.type == "cpu",
            updates_first=self.state.session.updates_first(),
        )

    def _adopt(self, found: ShapeClass) -> None:
        self._plan_class(found)
        assert found.plan is not None
        # See Note [Units on the device].
        wanted = on_device(found.plan)
        if self._on_device is not None:
            wanted = [a and b for a, b in zip(wanted, self._on_device, strict=True)]
        self._on_device = wanted
        for other in self.classes:
            planned = on_device(other.plan) if other.plan else wanted
            if planned != wanted:
                self._plan_class(other)
        self._follow(found)
        log.info("planned: %s", self.describe())
        self.second_runs.tell()

    def _follow(self, found: ShapeClass) -> None:
        """Uses a plan; what must stay on the device stays, and plans make do with it."""
        if not self._use(found) or self._on_device in (None, self.claims.resting):
            return
        self._on_device = self.claims.resting
        for each in self.classes:
            if each.plan is not None:
                self._plan_class(each)
        self._use(found)

    def _plan_class(self, found: ShapeClass) -> None:
        assert found.trace is not None
        paper = self._plan_for(found.trace, found.reserve)
        self._in_use = None
        self.following.begin(found, paper)

    def _use(self, found: ShapeClass) -> bool:
        """Claims what the plans need and tells the units. REQUIRES: between two rounds.

        False: not now, see Note [Other threads].
        """
        assert found.plan is not None
        assert found.trace is not None
        self._in_use = None
        self.state.landings.wait()
        plans = [c.plan for c in self.classes if c.plan is not None]
        if not self.claims.take(
            on_device(found.plan),
            min(plan.param_device_bytes for plan in plans),
            max(plan.activation_host_bytes for plan in plans),
            max(plan.activation_ssd_bytes for plan in plans),
            uses_of(found.trace, found.rounds),
        ):
            return False
        for unit, planned in zip(self.state.units, found.plan.units, strict=True):
            unit.activation = planned.activation
            unit.slices = planned.slices
        self.state.hooks.swapping.lookahead = found.plan.activation_lookahead
        self._in_use = found
        return True

    def _check_peak(self, current: ShapeClass, pytorch_bytes: int) -> None:
        """Holds the plan against what PyTorch's memory really reached."""
        assert current.plan is not None
        frames = current.plan.param_device_bytes + current.plan.resting_device_bytes
        current.device_peak = frames + pytorch_bytes
        excess = current.device_peak - self.goal.device_bytes
        if excess <= 0:
            return
        current.reserve += excess
        try:
            self._adopt(current)
        except StrataError:
            log.warning(
                "the device holds %s more than its budget, and there is no smaller plan%s",
                format_size(excess),
                self._enough(current),
            )

    def _enough(self, current: ShapeClass) -> str:
        """A device budget with which the step was planned on paper; empty where none was found."""
        assert current.trace is not None
        for size in (current.device_peak, current.device_peak + current.reserve):
            try:
                self._plan_for(current.trace, current.reserve, size)
            except StrataError:
                continue
            return f": device={size} would do"
        return ""

    def _judge(self, current: ShapeClass, window: Window) -> None:
        """Behind every window of steps: plans anew where the disk has become much slower than it
        was measured, or where steps have become such that another plan is faster."""
        assert current.paper is not None
        assert current.trace is not None
        predicted = current.predicted_seconds
        lanes = current.paper.simulate().lanes
        on_ssd = lanes["read"].bytes + lanes["write"].bytes > 0
        if on_ssd and window.step_seconds > SLOW_FACTOR * predicted:
            self._slow_windows += 1
            if self._slow_windows >= self._slow_windows_max:
                self._slow_windows, self._slow_windows_max = 0, 2 * self._slow_windows_max
                self._suspect_disk(window.step_seconds, predicted)
        elif self.following.differs(current):
            other = self._plan_for(current.trace, current.reserve)
            if self.following.worth(current, other):
                self._adopt(current)

    def _suspect_disk(self, measured: float, predicted: float) -> None:
        assert self.following.costs is not None
        old = self.following.costs.read_bytes_s
        self.measure_again()
        time = like(measured)
        log.warning(
            "steps take %s and %s were planned; the SSD reads %s/s, and %s/s when it was "
            "measured before: planned anew",
            time(measured),
            time(predicted),
            format_size(self.following.costs.read_bytes_s),
            format_size(old),
        )

    def measure_again(self) -> None:
        """Measures the machine as it is now, and plans anew. Call between two steps."""
        self.following.costs = self._measure(refresh=True)
        if self.current is not None and self.current.paper is not None:
            self._adopt(self.current)

    @property
    def device_peak(self) -> int:
        """Bytes of pages and of PyTorch at the peak of a step, as measured under the plan, or as
        planned until then; 0: not known yet."""
        if self.current is None or self.current.plan is None:
            return 0
        return self.current.device_peak or self.current.plan.peaks["device"].bytes

    def describe(self) -> str:
        """The plan in use, in one line."""
        if self.current is None or self.current.paper is None:
            return "nothing yet"
        return plan_line(self.current.paper, self.following.bound(self.current))
