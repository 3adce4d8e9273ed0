"""What the user asked of plans, and the batches that one plan serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from . import _core
    from ._core import Plan, StepPlan, Trace

Shape = tuple[tuple[int, ...], ...]

TIGHT_SHARE = 0.8  # of the device budget


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
    predicted_seconds: float = 0.0
    bound_seconds: float = 0.0

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
