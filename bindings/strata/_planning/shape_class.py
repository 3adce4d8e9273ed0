"""What the user asked of plans, and the batches that one plan serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .._profiling.reached import Pace
from .._profiling.windows import Windows

if TYPE_CHECKING:
    from .. import _core
    from .._core import Plan, StepPlan, Trace

Shape = tuple[tuple[int, ...], ...]

TIGHT_SHARE = 0.8  # of the device budget
CLASSES_MAX = 16
SMALL_SHARE = 0.5  # of a class's elements: smaller batches get a class of their own


@dataclass(frozen=True)
class Goal:
    """What the user asked for."""

    activations: str  # one of MODES
    split: int | None
    device_bytes: int  # frames, activations and PyTorch's own memory together
    param_bytes: int  # of the device, for parameters, until activations are known
    workers: int
    io_engine: str


@dataclass
class ShapeClass:
    """Batches that one plan serves."""

    shape: Shape
    trace: Trace | None = None  # None: to be recorded
    timed: int = 0  # steps
    paper: _core.PaperPlan | None = None  # None: to be timed
    plan: StepPlan | None = None  # of `paper`, which makes it anew each time it is asked
    device_peak: int = 0  # frames and PyTorch's memory, as measured under the plan; 0: not yet
    reserve: int = 0  # bytes of the device that plans leave alone, because one turned out too large
    number: int = 0  # of the plan, among all of the run
    planned_seconds: float = 0.0  # of a step, as predicted when the plan was made ...
    predicted_seconds: float = 0.0  # ... and as its times are by now
    settled: bool = False  # a step under the plan has moved what it wants elsewhere
    windows: Windows = field(default_factory=Windows)  # of the steps under the plan
    pace: Pace = field(default_factory=Pace)  # the best of all windows, under this plan or another

    @property
    def to_check(self) -> bool:
        """Whether the device comes so near its budget that it has to be measured under the plan."""
        if self.plan is None or self.device_peak:
            return False
        peak = self.plan["peaks"]["device"]
        return peak["bytes"] > TIGHT_SHARE * peak["budget"]

    @property
    def elements(self) -> int:
        """Of all tensors of the batch."""
        return sum(torch.Size(shape).numel() for shape in self.shape)

    def serves(self, shape: Shape) -> bool:
        """Whether a batch of this shape is nowhere larger than the recorded one."""
        return len(shape) == len(self.shape) and all(
            len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))
            for a, b in zip(shape, self.shape, strict=True)
        )


def find_class(classes: list[ShapeClass], shape: Shape) -> tuple[ShapeClass, list[ShapeClass]]:
    """The class of a batch, new or known, and all classes with it."""
    elements = ShapeClass(shape).elements
    serving = [c for c in classes if c.trace is not None and c.serves(shape)]
    best = min(serving, key=lambda c: c.elements, default=None)
    roomy = best is not None and elements < best.elements * SMALL_SHARE
    if best is not None and not (roomy and len(classes) < CLASSES_MAX):
        return best, classes
    if known := next((c for c in classes if c.shape == shape), None):
        return known, classes
    new = ShapeClass(shape)
    # What a new class serves as well is not needed any more.
    return new, [*[c for c in classes if c.trace is not None][-CLASSES_MAX + 1 :], new]


def on_device(plan: Plan | StepPlan) -> list[bool]:
    """By unit: whether all of it rests on the device."""
    return [unit["on_device"] for unit in plan["units"]]


def device_pages(resting: Plan, units: list[bool], param_bytes: int) -> int:
    """Bytes that pages take of the device: those of parameters on their way, and whole units."""
    return param_bytes + sum(
        unit["param_bytes"] + unit["grad_bytes"] + unit["state_bytes"]
        for unit, there in zip(resting["units"], units, strict=True)
        if there
    )
