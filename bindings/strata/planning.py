"""Plans a wrapped model's steps and carries the plans out: when to record, when to plan anew, which
plan holds for which shape of batch.

    state.planning = Planning(state, Goal(...))
    state.planning.begin_forward(args, kwargs)     # the model's forward is called
    state.planning.end_step()                      # behind optimizer.step()

The first step with a batch of an unseen shape is recorded while units recompute their activations,
which takes the least memory; budgets that cannot work are refused at its end. The next two show how
long computation takes when nothing disturbs it: they wait for the updates of the step before, and
nothing is recorded but times. Then the plan is made. In the first step under it PyTorch's memory is
measured again, if the budget is tight: where it is more than was planned, the plan is made anew
with that much less. Use from the thread that trains.

Note [Shape classes]. A plan made for one batch serves every batch that is nowhere larger: its
promises still hold. A batch that is larger somewhere, or has less than half the elements, gets a
plan of its own. What is claimed for plans (frames, room for swapped tensors) only ever changes one
way, so batches of many lengths do not make it swing to and fro.

Note [Units on the device]. What is left of the device may hold whole units, states included. They
move there and back between two steps, which takes as long as a few steps: so all plans want the
same ones there, and only a batch larger than any before brings them back, since nobody knows yet
what it leaves.

Note [Slices]. Keeping, swapping and recomputing give the same bits, so measured times may choose
between them. Slices change the shapes of matrix products, and with them the last bits: a batch is
cut only where nothing else fits, into the fewest slices that do, so that a run can be repeated.
What can be cut is found by trials that take time and memory, so they are left until then.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from . import _core, calibrate
from .arguments import tensors_in
from .cuda_memory import Allocator
from .errors import StrataError
from .fitting import advice
from .memory_curve import Curve, start_curve
from .shape_class import Goal, Shape, ShapeClass, device_pages, on_device
from .sizes import format_size
from .trace_of import make_trace, note_times
from .uses import RecordedStep

if TYPE_CHECKING:
    from ._core import Bound, Budgets, Costs, Simulation, StepPlan, Trace, Wishes
    from .wrapped import Wrapped

CLASSES_MAX = 16
SMALL_SHARE = 0.5  # of a class's elements: smaller batches get a class of their own
TIMED_STEPS = 2  # the first one still warms up
SLOW_STEPS = 3  # in a row, before the disk is measured anew
SLOW_FACTOR = 1.5  # of the predicted time
MODES: dict[str, Any] = {
    "auto": None,
    "keep": "keep",
    "swap": "swap_host",
    "recompute": "recompute",
}

log = logging.getLogger("strata")


class Planning:
    """The plans of one wrapped model."""

    def __init__(self, state: Wrapped, goal: Goal) -> None:
        self.state = state
        self.goal = goal
        self.costs: Costs | None = None  # measured when the first plan is made
        self.classes: list[ShapeClass] = []
        self.current: ShapeClass | None = None
        self._claimed = (0, 0, 0)  # device bytes of parameters, host and SSD bytes of activations
        self._on_device: list[bool] | None = None  # what plans rest there; None: they may choose
        self._slow_steps = 0
        self._mixed = False  # batches of two classes in one step: its times say little
        self._curve: Curve | None = None  # of a step that is measured
        state.may_split = goal.split is not None
        self.allocator = Allocator(state.device, goal.device_bytes)
        self.allocator.give_pages(goal.param_bytes)

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
        paper = self.current.paper if self.current else None
        return paper.bound() if paper else None

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Chooses the plan for a batch. Called ahead of every forward of the whole model."""
        if not torch.is_grad_enabled():
            return
        shape: Shape = tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))
        found = self._class_of(shape)
        self._mixed = self._mixed or (found is not self.current and self.state.recorder.in_step)
        changes = found is not self.current
        self.current = found
        if found.paper is None:
            self._observe(found)
        elif changes:
            self._use(found)
        if found.to_check and self._curve is None:
            self._curve = start_curve(self.state.device)

    def end_step(self) -> None:
        """Looks at the step that has ended, and plans. Called behind every optimizer.step().

        Raises StrataError where the budgets cannot work.
        """
        promise = self.current if self.current and self.current.paper else None
        step = self.state.end_step(
            promise.predicted_seconds if promise else None,
            promise.bound_seconds if promise else None,
        )
        current, mixed, curve = self.current, self._mixed, self._curve
        self._mixed, self._curve = False, None
        if curve is not None:
            curve.stop()
        if current is None or not step.uses or not step.uses[-1].backward:
            return
        if current.trace is None:
            if step.detailed:
                trace = make_trace(step, self.state)
                try:
                    self._plan_for(trace, 0)  # refused now, if it has to be
                except StrataError:
                    if not self._may_try_slices():
                        raise
                    self.state.may_split = True  # recorded again, with trials of what can be cut
                    return
                current.trace = trace
        elif current.paper is None:
            note_times(current.trace, step, first=current.timed == 0)
            current.timed += 1
            if current.timed == TIMED_STEPS:
                self._adopt(current)
        elif curve is not None:
            self._check_peak(current, curve.peak(step.begin, inf))
        elif not mixed and step.rounds == 1:
            self._watch_speed(current, step)

    def _may_try_slices(self) -> bool:
        return self.goal.activations == "auto" and not self.state.may_split

    def _class_of(self, shape: Shape) -> ShapeClass:
        elements = ShapeClass(shape).elements
        serving = [c for c in self.classes if c.trace is not None and c.serves(shape)]
        best = min(serving, key=lambda c: c.elements, default=None)
        roomy = best is not None and elements < best.elements * SMALL_SHARE
        if best is not None and not (roomy and len(self.classes) < CLASSES_MAX):
            return best
        new = next((c for c in self.classes if c.shape == shape), None)
        if new is None:
            new = ShapeClass(shape)
            # What a new class serves as well is not needed any more.
            self.classes = [c for c in self.classes if c.trace is not None][-CLASSES_MAX + 1 :]
            self.classes.append(new)
        return new

    def _observe(self, found: ShapeClass) -> None:
        """Lets the step that begins be recorded, or timed, in the mode that needs least memory."""
        if self.state.recorder.in_step:
            return  # another round of the step that is being recorded or timed
        keeps = self.goal.activations == "keep"
        for unit in self.state.units:
            unit.activation = "recompute" if unit.may_recompute and not keeps else "keep"
            unit.slices = 1
        if found.trace is not None:
            self.state.synchronize()
            return
        known = [c.elements for c in self.classes if c.trace is not None]
        if self._on_device is not None and found.elements > max(known, default=0):
            self._on_device = None
            self._claim_device([False] * len(self.state.units), self.goal.param_bytes)
        self.state.recorder.begin()
        log.info("recording a step with a batch of %s", " ".join(map(str, found.shape)))

    def _budgets(self, reserve: int) -> Budgets:
        config, resting = self.state.config, self.state.session.plan
        return {
            "page_bytes": resting["page_bytes"],
            "device_bytes": max(0, self.goal.device_bytes - reserve),
            "host_bytes": config["host_bytes"] - resting["buffer_bytes"],
            "ssd_bytes": config["ssd_bytes"],
            "staging_bytes": resting["staging_bytes"],
            "grads_rest": config["update"] == "on_step",
        }

    def _plan_for(self, trace: Trace, reserve: int) -> _core.PaperPlan:
        """See Note [Slices]. Raises StrataError where the budgets cannot work."""
        if self.costs is None:
            self.costs = self._measure()
        paper = self._best_of(trace, reserve, self._on_device)
        if self._on_device is not None and not paper.plan["feasible"]:
            paper = self._best_of(trace, reserve, None)
        if not paper.plan["feasible"]:
            refusal = paper.plan["refusal"]
            raise StrataError(refusal + advice(self.state.model, refusal))
        return paper

    def _best_of(self, trace: Trace, reserve: int, resting: list[bool] | None) -> _core.PaperPlan:
        assert self.costs is not None
        budgets = self._budgets(reserve)
        slices = [self.goal.split or 0]
        if self.goal.activations == "auto" and not self.goal.split:
            most = max(unit["slices_max"] for unit in trace["units"])
            slices += [2**n for n in range(1, most.bit_length()) if 2**n <= most]
        for count in slices:
            wishes: Wishes = {
                "activation": MODES[self.goal.activations],
                "slices": count,
                "may_split": False,
                "on_device": resting,
            }
            paper = _core.PaperPlan(trace, self.costs, budgets, wishes)
            if paper.plan["feasible"]:
                break
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
        return {**costs, "landing_waits": self.state.device.type == "cpu"}

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
        self._use(found)
        if self._resting() != wanted:  # what must stay there stays, and plans make do with it
            self._on_device = self._resting()
            for each in self.classes:
                if each.plan is not None:
                    self._plan_class(each)
            self._use(found)
        log.info("planned: %s", self.describe())

    def _plan_class(self, found: ShapeClass) -> None:
        assert found.trace is not None
        found.paper = self._plan_for(found.trace, found.reserve)
        found.plan = found.paper.plan
        found.device_peak = 0
        found.predicted_seconds = found.paper.simulate()["step_seconds"]
        found.bound_seconds = found.paper.bound()["seconds"]

    def _use(self, found: ShapeClass) -> None:
        """Claims what the plans need and tells the units. REQUIRES: between two rounds."""
        assert found.plan is not None
        self.state.landings.wait()
        plans = [c.plan for c in self.classes if c.plan is not None]
        claimed = (
            min(plan["param_device_bytes"] for plan in plans),
            max(plan["activation_host_bytes"] for plan in plans),
            max(plan["activation_ssd_bytes"] for plan in plans),
        )
        self._claim_device(on_device(found.plan), claimed[0])
        if claimed[1:] != self._claimed[1:]:
            self._claim_activations(*claimed[1:])
        for unit, planned in zip(self.state.units, found.plan["units"], strict=True):
            unit.activation = planned["activation"]
            unit.slices = planned["slices"]
        self.state.hooks.swapping.lookahead = found.plan["activation_lookahead"]

    def _claim_activations(self, host_bytes: int, ssd_bytes: int) -> None:
        if self.state.hooks.swapping.drain():  # of graphs that somebody keeps
            return
        try:
            self.state.session.reserve_activations(host_bytes, ssd_bytes)
        except StrataError as error:
            log.warning("tensors that find no room stay on the device: %s", error)
        self._claimed = (self._claimed[0], host_bytes, ssd_bytes)

    def _claim_device(self, units: list[bool], param_bytes: int) -> None:
        session, now = self.state.session, self._resting()
        if units == now and param_bytes == self._claimed[0]:
            return
        if units != now and self.state.hooks.swapping.drain():
            return  # as above
        before, after = self.allocator.page_bytes, device_pages(session.plan, units, param_bytes)
        self.allocator.give_pages(max(before, after))
        if units == now:
            session.limit_device(param_bytes)
        else:
            try:
                session.rest_on_device(units, param_bytes)
            except StrataError as error:
                self.allocator.give_pages(before)
                log.info("units rest where they are: %s", error)
                return
        self.allocator.give_pages(after)
        self._claimed = (param_bytes, *self._claimed[1:])

    def _resting(self) -> list[bool]:
        return on_device(self.state.session.plan)

    def _check_peak(self, current: ShapeClass, pytorch_bytes: int) -> None:
        """Holds the plan against what PyTorch's memory really reached."""
        assert current.plan is not None
        frames = current.plan["param_device_bytes"] + current.plan["resting_device_bytes"]
        current.device_peak = frames + pytorch_bytes
        excess = current.device_peak - self.goal.device_bytes
        if excess <= 0:
            return
        current.reserve += excess
        try:
            self._adopt(current)
        except StrataError:
            log.warning(
                "the device holds %s more than its budget, and there is no smaller plan: "
                "device=%d would do",
                format_size(excess),
                current.device_peak,
            )

    def _watch_speed(self, current: ShapeClass, step: RecordedStep) -> None:
        """Plans anew where the disk has become much slower than it was measured."""
        predicted = current.predicted_seconds
        slow = step.end - step.begin > SLOW_FACTOR * predicted
        self._slow_steps = self._slow_steps + 1 if slow else 0
        if self._slow_steps < SLOW_STEPS or not self.state.config["ssd_paths"]:
            return
        self._slow_steps = 0
        assert self.costs is not None
        old = self.costs["read_bytes_s"]
        self.measure_again()
        log.warning(
            "steps take %.1f s and %.1f s were planned; the SSD reads %s/s, and %s/s when it was "
            "measured before: planned anew",
            step.end - step.begin,
            predicted,
            format_size(self.costs["read_bytes_s"]),
            format_size(old),
        )

    def measure_again(self) -> None:
        """Measures the machine as it is now, and plans anew. Call between two steps."""
        self.costs = self._measure(refresh=True)
        if self.current is not None and self.current.paper is not None:
            self._adopt(self.current)

    def describe(self) -> str:
        """The plan in use, in one line."""
        if self.current is None or self.current.paper is None:
            return "nothing yet"
        paper = self.current.paper
        plan, run, bound = paper.plan, paper.simulate(), paper.bound()
        modes: dict[str, int] = {}
        for unit in plan["units"]:
            sliced = f" in {unit['slices']}" if unit["slices"] > 1 else ""
            key = unit["activation"].replace("_", " to ") + sliced
            modes[key] = modes.get(key, 0) + 1
        resting = ""
        if plan["resting_device_bytes"]:
            units = sum(on_device(plan))
            resting = f" and {format_size(plan['resting_device_bytes'])} for {units} whole units"
        return (
            f"{', '.join(f'{count} units {mode}' for mode, count in modes.items())}; device peak "
            f"{format_size(plan['peaks']['device']['bytes'])}, of it "
            f"{format_size(plan['param_device_bytes'])} for parameters{resting}; "
            f"{run['step_seconds']:.2f} s a step predicted, "
            f"{bound['seconds'] / run['step_seconds']:.0%} of the bound ({bound['what']})"
        )
