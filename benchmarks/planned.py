"""A side under a plan: wrapped with activations=, stepped until the plan is in use, measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .common import BenchError
from .sides import Paged, Plain, session_of

UNDER_WAY = 4  # steps: one is recorded, two are timed, one fills what the plan has just moved


class Planned(Paged):
    """A model whose activations are planned."""

    def __init__(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        memory: Mapping[str, int],
        ssd_path: Path | None = None,
        activations: str = "auto",
        split: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        planned = {"activations": activations, "split": split, **(options or {})}
        super().__init__(model, batch, memory, ssd_path, planned)

    def settle(self) -> None:
        """Steps until the plan is in use."""
        for _ in range(UNDER_WAY):
            self.step()

    @property
    def planning(self) -> Any:
        """The planning of the wrapped model."""
        from strata.wrapped import wrapped

        return wrapped(self.model).planning

    def activation_peak(self) -> int:
        """The most memory that PyTorch takes in a step, in bytes, beside our pages."""
        return pytorch_peak(self)

    def device_peak(self) -> int:
        """That, and the frames of parameters."""
        return self.activation_peak() + int(self.planning.plan["param_device_bytes"])


def pytorch_peak(side: Plain | Paged) -> int:
    """The most memory that PyTorch's allocator hands out in a step, beyond what it held before."""
    from strata.memory_curve import MemoryCurve

    curve = MemoryCurve.start()
    if curve is None:
        raise BenchError("a profiler is running already")
    side.step()
    curve.stop()
    side.synchronize()
    return curve.peak(0.0, float("inf"))


def uploaded_bytes(side: Paged) -> int:
    """Bytes of parameters that crossed to the device so far."""
    return int(session_of(side.model).stats()["host to device bytes"])
