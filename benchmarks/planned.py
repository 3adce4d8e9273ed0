"""A side under a plan: wrapped with activations=, stepped until the plan is in use, measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .common import BenchError
from .sides import Paged, Plain

STEPS_MAX = 10_000  # of a window
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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        planned = {"activations": activations, **(options or {})}
        super().__init__(model, batch, memory, ssd_path, planned)

    def settle(self) -> None:
        """Steps until the plan is in use."""
        for _ in range(UNDER_WAY):
            self.step()

    @property
    def planning(self) -> Any:
        """The planning of the wrapped model."""
        from strata._runtime.wrapped import wrapped

        return wrapped(self.model).planning


def judge(side: Planned, quick: bool = False) -> Any:
    """The report of a side under its plan, behind a whole window of steps; `quick`: some steps."""
    import strata

    for _ in range(STEPS_MAX):
        side.step()
        report = strata.report(side.model)
        if report.judged is not None and (report.judged.whole or quick):
            return report
    raise BenchError(f"{STEPS_MAX} steps are no window")


def share_of_bound(report: Any) -> float:
    """Of the lower bound, what was reached, as the report says. BenchError where that is more than
    all: then the bound is none."""
    percent = float(report.percent_of_bound)
    if not 0 < percent <= 100:
        raise BenchError(f"steps reach {percent:.1f} % of a bound that none can pass")
    return percent / 100


def pytorch_peak(side: Plain | Paged) -> int:
    """The most memory that PyTorch's allocator hands out in a step, beyond what it held before."""
    from strata._profiling.memory_curve import MemoryCurve

    curve = MemoryCurve.start()
    if curve is None:
        raise BenchError("a profiler is running already")
    side.step()
    curve.stop()
    side.synchronize()
    return curve.peak(0.0, float("inf"))
