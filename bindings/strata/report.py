"""What strata tells people: where things go (plan) and where time and bytes went (report)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .sizes import format_size

WAITS_SHOWN = 8  # units, those that were waited for longest

if TYPE_CHECKING:
    from ._core import Plan
    from .wrapped import Wrapped


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
class TierUse:
    """Bytes of one tier: the budget, what is in use now, and the most that ever was."""

    budget: int
    used: int
    peak: int


@dataclass(frozen=True)
class Report:
    """What strata.report() returns: counters since wrap(). str() gives tables."""

    steps: int
    steps_nonfinite: int  # gradients held infinities or NaN ...
    steps_skipped: int  # ... and nothing was updated (skip_nonfinite=True)
    grad_norm: float | None  # of the last step, before clipping
    tiers: dict[str, TierUse]
    link_bytes: dict[str, int]  # moved, by "<from> to <to>"
    waited_seconds: dict[str, float]  # for pages, by unit
    page_bytes: int
    io_engine: str  # "" where nothing is on the SSD
    backend: str
    stats: dict[str, Any]  # all counters of the core

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        """Tables for people."""
        head = f"{self.steps} steps"
        if self.steps_nonfinite:
            head += f", {self.steps_nonfinite} not finite ({self.steps_skipped} skipped)"
        if self.grad_norm is not None:
            head += f"; last gradient norm {self.grad_norm:.4g}"
        head += f"; {self.backend} backend, pages of {format_size(self.page_bytes)}"
        head += f", {self.io_engine} I/O" if self.io_engine else ""
        tiers = [["tier", "budget", "used", "peak"]]
        for name, tier in self.tiers.items():
            tiers.append([name, *map(format_size, (tier.budget, tier.used, tier.peak))])
        links = [["link", "moved", "per step"]]
        for name, moved in self.link_bytes.items():
            links.append([name, format_size(moved), format_size(moved / max(1, self.steps))])
        waits = [["waited for pages of", "seconds"]]
        for name, seconds in sorted(self.waited_seconds.items(), key=lambda item: -item[1]):
            waits.append([name, f"{seconds:.3f}"])
        del waits[WAITS_SHOWN + 1 :]
        waits.append(["all units", f"{sum(self.waited_seconds.values()):.3f}"])
        return "\n\n".join([head, table(tiers), table(links), table(waits)])


def make_report(state: Wrapped) -> Report:
    """The report of a wrapped model, now."""
    stats = state.session.stats()
    config = state.config
    host = stats["host_bytes"]
    return Report(
        steps=state.steps,
        steps_nonfinite=state.steps_nonfinite,
        steps_skipped=state.steps_skipped,
        grad_norm=state.last_step["norm"] if state.last_step else None,
        tiers={
            "device": TierUse(
                config["device_bytes"], stats["device_bytes"], stats["device_bytes_peak"]
            ),
            # Frames of these two are claimed once and for all.
            "host": TierUse(config["host_bytes"], host, host),
            "ssd": TierUse(config["ssd_bytes"], stats["ssd_bytes"], stats["ssd_bytes"]),
        },
        link_bytes={k.removesuffix(" bytes"): v for k, v in stats.items() if k.endswith(" bytes")},
        waited_seconds=dict(zip(config["units"], stats["waited_s"], strict=True)),
        page_bytes=state.session.plan["page_bytes"],
        io_engine=stats["io_engine"],
        backend=stats["backend"],
        stats=stats,
    )


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
