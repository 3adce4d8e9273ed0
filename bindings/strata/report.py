"""What strata tells people: where things go (plan) and where time and bytes went (report)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .sizes import format_size

if TYPE_CHECKING:
    from ._core import Plan


@dataclass(frozen=True)
class PlanReport:
    """What strata.plan() returns: what would go where. str() gives a table."""

    plan: Plan
    budgets: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        """A table for people."""
        plan = self.plan
        rows = [["tier", "budget", "used"]]
        for tier, budget in self.budgets.items():
            rows.append([tier, format_size(budget), format_size(plan[f"{tier}_bytes"])])  # type: ignore[literal-required]
        units = [["unit", "elements", "bytes", "parameters", "gradients", "state"]]
        for unit in plan["units"]:
            units.append(
                [
                    unit["name"],
                    f"{unit['params']:,}",
                    format_size(unit["param_bytes"]),
                    unit["param_tier"],
                    unit["grad_tier"],
                    unit["state_tier"],
                ]
            )
        return "\n".join(
            [
                f"pages of {format_size(plan['page_bytes'])}; staging "
                f"{format_size(plan['staging_bytes'])} of host memory; smallest device budget "
                f"{format_size(plan['device_bytes_min'])}",
                table(rows),
                table(units),
            ]
        )


@dataclass(frozen=True)
class Report:
    """What strata.report() returns: counters of a session. str() gives a table."""

    budgets: dict[str, int]
    steps: int
    steps_skipped: int
    accumulate: bool
    stats: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        """A table for people."""
        return "\n".join(f"{key}: {value}" for key, value in self.to_dict().items())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first one left-aligned, the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
