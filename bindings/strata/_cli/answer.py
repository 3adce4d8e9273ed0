"""What `strata plan` and `strata estimate` answer: a forecast, and what follows for a whole run,
the SSD's life and budgets on this machine.

    answer = Answer(forecast(trace, costs, budgets, wishes, tokens), steps=200,
                    endurance_bytes=600 * 10**12, notes=budget_check.remarks(memory, "host", []))
    print(answer)                     # answer.to_dict() for programs

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _core
from .._config.sizes import format_duration, write_size
from .._planning.forecast import Forecast, staging_bytes
from .._report.endurance import wear_lines

if TYPE_CHECKING:
    from .._core import Budgets, Costs, Trace, Wishes

UNBOUNDED = 1 << 50


@dataclass(frozen=True)
class Answer:
    """A forecast among its circumstances."""

    forecast: Forecast
    steps: int | None = None  # of the whole run
    endurance_bytes: int | None = None  # of the drives
    ssd_bytes_enough: int = 0  # what would do, where there is no SSD and host memory is too small
    notes: Sequence[str] = ()

    @property
    def status(self) -> int:
        """The command's exit status."""
        return 0 if self.forecast.feasible else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return self.forecast.to_dict() | {
            "ssd_bytes_per_step": self.forecast.written_bytes,
            "ssd_bytes_enough": self.ssd_bytes_enough,
            "wear": self._wear(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """For people."""
        return "\n\n".join(filter(None, [str(self.forecast), "\n".join(self._sentences())]))

    def _sentences(self) -> list[str]:
        found = self._wear()
        seconds = self.forecast.step_seconds
        if seconds and self.steps:
            found.insert(0, f"{self.steps:,} steps take {format_duration(self.steps * seconds)}")
        if self.ssd_bytes_enough:
            found.append(f"give it an SSD: ssd={write_size(self.ssd_bytes_enough)} would do")
        return [*found, *self.notes]

    def _wear(self) -> list[str]:
        seconds = self.forecast.step_seconds
        if not seconds:
            return []
        return wear_lines(self.forecast.written_bytes, self.endurance_bytes, self.steps, seconds)


def ssd_enough(trace: Trace, costs: Costs, budgets: Budgets, wishes: Wishes) -> int:
    """Bytes of an SSD with which a step would fit that does not fit without one; 0 where none
    helps."""
    if budgets["ssd_bytes"]:
        return 0
    page_bytes = budgets["page_bytes"]
    with_ssd: Budgets = {
        **budgets,
        "ssd_bytes": UNBOUNDED,
        "staging_bytes": staging_bytes(budgets["host_bytes"], page_bytes),
    }
    plan = _core.PaperPlan(trace, costs, with_ssd, wishes).plan
    return plan["peaks"]["ssd"]["bytes"] if plan["feasible"] else 0
