"""What the planner says of a step on a machine, without running anything.

found = forecast(trace, costs, budgets, wishes, tokens=2048)
found.feasible, found.step_seconds, found.percent_of_bound
print(found)                      # tables; found.to_dict() for programs
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .. import _core
from .._config.choices import in_words
from .._config.sizes import format_rate, format_size
from .._report.report_text import LONG_SECONDS, like, partition_text, runs, table
from .limits import Setting, limiting_sentence

if TYPE_CHECKING:
    from .._core import Bound, Budgets, Costs, Simulation, Stall, StepPlan, Trace, Wishes

PURPOSES = {
    "param": "parameters",
    "activation": "activations",
    "grad": "gradients",
    "state": "updates",
}
LANE_NAMES = {
    "compute": "computation",
    "upload": "host to device",
    "download": "device to host",
    "read": "ssd to host",
    "write": "host to ssd",
    "update": "optimizer",
}


@dataclass(frozen=True)
class Forecast:
    """A plan and what it leads to. Where it is infeasible there is no simulation."""

    trace: Trace
    budgets: Budgets
    plan: StepPlan
    bound: Bound
    simulation: Simulation | None
    tokens: int = 0  # of a step; 0: unknown
    changes: Sequence[str] = ()  # to the model, so that it trains in less memory
    limited: str = ""  # what limits a step, in a sentence
    ranks: int = 1  # that train together: this is the one of them that holds most

    @property
    def feasible(self) -> bool:
        """Whether the step fits, and ends."""
        return self.step_seconds is not None

    @property
    def step_seconds(self) -> float | None:
        """None where the step does not fit, or needs a link that this machine has not."""
        if self.simulation is None or not math.isfinite(self.simulation.step_seconds):
            return None
        return self.simulation.step_seconds

    @property
    def written_bytes(self) -> int:
        """To the SSD, in a step."""
        return self.simulation.lanes["write"].bytes if self.simulation else 0

    @property
    def percent_of_bound(self) -> float | None:
        """100: no plan could be faster."""
        seconds = self.step_seconds
        return 100 * self.bound.seconds / seconds if seconds else None

    @property
    def refusal(self) -> str:
        """Why not; empty where it is feasible."""
        if not self.plan.feasible:
            return self.plan.refusal
        return "" if self.feasible else "infeasible: pages have to move over a link without speed"

    @property
    def partition(self) -> str:
        """What is shared out among the ranks, in a sentence; empty where there is one, or no
        plan."""
        resident = self.plan.resident if self.plan.feasible else []
        return partition_text(self.ranks, sum(resident), len(resident))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        plan = self.plan.to_dict()
        units = plan.pop("units")
        run = self.simulation.to_dict() if self.simulation and self.feasible else {}
        return {
            "feasible": self.feasible,
            "refusal": self.refusal,
            "device_bytes_min": self.plan.device_bytes_min,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self._tokens_per_second(),
            "changes": list(self.changes),
            "bound": self.bound.to_dict(),
            "percent_of_bound": self.percent_of_bound,
            "limited": self.limited,
            "ranks": self.ranks,
            "partition": self.partition,
            "lanes": run.get("lanes", {}),
            "stalls": run.get("stalls", []),
            "budgets": self.budgets.to_dict(),
            "plan": plan,
            "units": [
                {"name": unit.name, **planned}
                for unit, planned in zip(self.trace.units, units, strict=False)
            ],
        }

    def __str__(self) -> str:
        """For people."""
        if not self.feasible:
            return f"does not fit\n{self.refusal}\n{self._smallest()}".rstrip()
        parts = [self._summary(), table(self._tiers()), table(self._units())]
        parts.append(table(self._lanes()))
        if stalls := self._stalls():
            parts.append(table(stalls))
        return "\n\n".join(parts)

    def _summary(self) -> str:
        seconds = cast(float, self.step_seconds)
        speed = self._tokens_per_second()
        time = like(seconds)
        return "\n".join(
            [
                f"{self._verdict(seconds)}; {self._smallest()}",
                f"{time(seconds)} a step predicted"
                + (f", {format_rate(speed, 'tokens')}" if speed else ""),
                f"lower bound {time(self.bound.seconds)} ({self.bound.what}), "
                f"{self.percent_of_bound:.0f} % of it reached",
                *([self.limited] if self.limited else []),
                *([self._ranks(), self.partition] if self.ranks > 1 else []),
                *self.changes,
            ]
        )

    def _ranks(self) -> str:
        return (
            f"{self.ranks} ranks, each with a device of its own and an equal part of host and ssd; "
            "the tokens are those of all, and the rest is of the rank that holds most"
        )

    def _verdict(self, seconds: float) -> str:
        if seconds < LONG_SECONDS:  # who asks whether it fits wants to know of longer ones
            return "fits"
        return f"fits, but a step takes {like(seconds)(seconds)}"

    def _smallest(self) -> str:
        smallest = self.plan.device_bytes_min
        if not smallest:
            return ""
        return f"the smallest device budget that would do is {format_size(smallest)}"

    def _tokens_per_second(self) -> float | None:
        seconds = self.step_seconds
        return self.tokens / seconds if self.tokens and seconds else None

    def _tiers(self) -> list[list[str]]:
        rows = [["tier", "budget", "peak", "at"]]
        for tier, peak in self.plan.peaks.items():
            rows.append(
                [
                    tier,
                    format_size(peak.budget),
                    format_size(peak.bytes),
                    self._where(peak.use) if peak.bytes else "",
                ]
            )
        return rows

    def _where(self, use: int) -> str:
        if use >= len(self.trace.uses):
            return "the end"
        found = self.trace.uses[use]
        way = "backward" if found.backward else "forward"
        return f"{way} of {self.trace.units[found.unit].name}"

    def _units(self) -> list[list[str]]:
        """Units in a row of which the plan says the same share a line. Resident are parameters that
        never leave the device, and whole units of which nothing does."""
        planned = zip(self.trace.units, self.plan.units, self.plan.resident, strict=True)
        cells = []
        for unit, plan, resident in planned:
            total = unit.param_bytes + unit.grad_bytes + unit.state_bytes
            on_ssd = plan.param_ssd_bytes + plan.grad_ssd_bytes + plan.state_ssd_bytes
            share = f"{100 * on_ssd / total:.0f} %" if total else "-"
            words = in_words(plan.activation)
            where = "whole" if plan.on_device else "yes" if resident else "no"
            cells.append((unit.name, [words, str(plan.slices), where, share]))
        return [["unit", "activations", "slices", "resident", "on ssd"], *runs(cells)]

    def _lanes(self) -> list[list[str]]:
        assert self.simulation is not None
        seconds = cast(float, self.step_seconds)
        rows = [["lane", "busy", "of the step", "moved"]]
        for lane, use in self.simulation.lanes.items():
            busy = use.busy_seconds
            moved = format_size(use.bytes) if use.bytes else ""
            share = f"{100 * busy / seconds:.0f} %"
            rows.append([LANE_NAMES[lane], like(seconds)(busy), share, moved])
        return rows

    def _stalls(self) -> list[list[str]]:
        """What computation waits for, the longest first; waits of one kind share a line."""
        assert self.simulation is not None
        kinds: dict[str, list[Stall]] = defaultdict(list)
        for stall in self.simulation.stalls:
            way = "backward" if self._is_backward(stall.use) else "forward"
            what = PURPOSES.get(stall.purpose, stall.purpose)
            kinds[f"{way} for {what} ({LANE_NAMES[stall.lane]})"].append(stall)
        total = {kind: sum(s.seconds for s in stalls) for kind, stalls in kinds.items()}
        if not total:
            return []
        rows = [["computation waits in", "lost", "waits", "longest at"]]
        time = like(self.step_seconds)
        for kind in sorted(total, key=lambda kind: -total[kind]):
            longest = max(kinds[kind], key=lambda stall: stall.seconds)
            where = self._where(longest.use)
            rows.append([kind, time(total[kind]), str(len(kinds[kind])), where])
        return rows

    def _is_backward(self, use: int) -> bool:
        return use < len(self.trace.uses) and self.trace.uses[use].backward


def forecast(
    trace: Trace, costs: Costs, budgets: Budgets, wishes: Wishes, tokens: int = 0
) -> Forecast:
    """Plans, and plays the plan on paper. Raises ValueError for a trace that contradicts itself."""
    paper = _core.PaperPlan(trace, costs, budgets, wishes)
    plan = paper.plan
    simulation = paper.simulate() if plan.feasible else None
    limited = ""
    if simulation is not None:
        update = "on_step" if budgets.grads_rest else "in_backward"
        setting = Setting(ssd=budgets.ssd_bytes > 0, update=update)
        limited = limiting_sentence(paper, costs, setting)
    return Forecast(trace, budgets, plan, paper.bound(), simulation, tokens, limited=limited)
