"""`strata doctor`: whether training would work on this machine, in which budgets and up to which
size of a model, and what to change first.

strata doctor --ssd-path /mnt/nvme0 /mnt/nvme1

What needs torch is left out where it cannot be imported; then that is the first thing to change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._config import machine
from ..._config.sizes import format_rate, format_size
from ..._errors import import_failure
from ..._planning.budget_check import KINDS
from ..._report.report_text import folded, wear_lines
from .facts import BAD, WARNING, Fact, facts

if TYPE_CHECKING:
    from ..._profiling.calibrate import Calibration
    from .capacity import Largest

COLUMNS = 100
WRITES_ANEW = ("btrfs", "zfs")  # file systems with a word of their own that lie on drives
GAIN_MIN = 0.05  # a change that brings less is not worth a line


@dataclass(frozen=True)
class Change:
    """Something to do, and what it brings: 0.5 is a model half as large again, or a step so much
    faster. None: not known."""

    says: str
    gain: float | None = None


@dataclass
class Diagnosis:
    """All that is said."""

    facts: list[Fact]
    budgets: dict[str, int] | None = None
    largest: Largest | None = None
    largest_base: Largest | None = None  # of adapters, in 4 bits; None, too, without PEFT
    wear: Sequence[str] = ()
    why_no_capacity: str = ""  # why nothing is known of budgets and models
    changes: Sequence[Change] = ()

    @property
    def why_not(self) -> list[str]:
        """Why training would not work; empty where it would."""
        found = [f"{fact.name}: {fact.says}" for fact in self.facts if fact.verdict == BAD]
        if self.budgets is not None and self.largest is None and not self.why_no_capacity:
            found.append("not even a model of 10 M parameters fits into the budgets")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "works": not self.why_not,
            "why_not": self.why_not,
            "facts": [asdict(fact) for fact in self.facts],
            "budgets": self.budgets,
            "largest": self.largest.to_dict() if self.largest else None,
            "largest_base": self.largest_base.to_dict() if self.largest_base else None,
            "wear": list(self.wear),
            "why_no_capacity": self.why_no_capacity,
            "changes": [asdict(change) for change in self.changes],
        }

    def __str__(self) -> str:
        """For people."""
        lines = []
        for fact in self.facts:
            lines += _wrapped(f"{fact.verdict:<8} {fact.name}: {fact.says}", 9)
        lines += ["", *self._capacity()]
        if self.changes:
            lines += ["", "what to change first:"]
        for number, change in enumerate(self.changes, 1):
            lines += _wrapped(f"{number:2}. {change.says}", 4)
        lines += [""]
        if not self.why_not:
            return "\n".join([*lines, "training would work"])
        return "\n".join(
            [*lines, *_wrapped(f"training would not work: {'; '.join(self.why_not)}", 4)]
        )

    def _capacity(self) -> Iterator[str]:
        if self.budgets is not None:
            sizes = {tier: _written(size) for tier, size in self.budgets.items() if size}
            yield f"budgets it would choose: memory={sizes}"
        if self.why_no_capacity:
            what = "models are" if self.budgets else "budgets and models are"
            yield from _wrapped(f"{what} not known: {self.why_no_capacity}", 4)
        if self.largest is None:
            return
        found = self.largest
        yield from _wrapped(f"largest model: {_in_words(found)}", 4)
        if found.refusal:
            yield from _wrapped(f"the next larger one would not fit: {found.refusal}", 4)
        if self.largest_base is not None:
            base = _in_words(self.largest_base)
            yield from _wrapped(
                f"largest base of adapters (strata finetune --lora r=8 --frozen nf4): {base}", 4
            )
        yield from self.wear


def _in_words(found: Largest) -> str:
    hidden, layers, *_ = found.shape
    tokens = found.forecast.tokens
    rate = tokens / (found.forecast.step_seconds or float("inf"))
    return (
        f"{_billions(found.parameters)} parameters (a Llama of {layers} layers, {hidden} wide) "
        f"with {tokens:,} tokens in a step, about {format_rate(rate, 'tokens')}"
    )


def run(options: argparse.Namespace) -> int:
    """0 where training would work, 1 where not. `options`: of options.doctor_parser()."""
    found = diagnose(options)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 1 if found.why_not else 0


def diagnose(options: argparse.Namespace) -> Diagnosis:
    """Looks at everything."""
    found = Diagnosis(list(facts(options)))
    by_name = {fact.name: fact for fact in found.facts}
    changes: list[Change] = []
    if by_name["torch"].verdict == BAD:
        found.why_no_capacity = "torch cannot be used"
    else:
        try:
            changes += _look_ahead(found, options, by_name)
        except ImportError as error:
            found.why_no_capacity = import_failure(error)
        except (OSError, ValueError, RuntimeError) as error:
            found.why_no_capacity = " ".join(str(error).split())
    found.changes = [
        *(Change(fact.change) for fact in found.facts if fact.verdict == BAD and fact.change),
        *sorted(
            (change for change in changes if change.gain is None or change.gain >= GAIN_MIN),
            key=lambda change: -(change.gain or 0.0),
        ),
        *(Change(fact.change) for fact in found.facts if fact.verdict == WARNING and fact.change),
    ]
    return found


def _look_ahead(
    found: Diagnosis, options: argparse.Namespace, by_name: dict[str, Fact]
) -> list[Change]:
    """Budgets, the largest model, and what would bring more. Raises where nothing can be known."""
    from . import capacity

    device_name = by_name["device"].figures["device"]
    paths = [p for p in options.ssd_path if by_name[f"SSD {p}"].verdict != BAD]
    room = capacity.budgets(device_name, paths)
    speeds = capacity.calibrated(options, device_name, paths)
    found.budgets = room
    found.largest = capacity.largest(room, speeds, options, device_name)
    if found.largest is None:
        return []
    with contextlib.suppress(ImportError):  # PEFT is not needed otherwise
        found.largest_base = capacity.largest(room, speeds, options, device_name, capacity.ADAPTERS)
    forecast = found.largest.forecast
    endurance = options.ssd_endurance or _endurance(found.facts)
    found.wear = wear_lines(forecast.written_bytes, endurance, None, forecast.step_seconds)
    changes = [
        Change(
            f"{limit.resource} limits its step (twice as fast it would save {limit.saves:.0%}): "
            f"{' or '.join(limit.advice)} would help",
            1 / (1 - limit.saves) - 1,
        )
        for limit in capacity.slow_parts(found.largest, speeds.costs, options, device_name)
    ]
    if not paths:
        changes.append(_with_ssd(found.largest, room, speeds, options, device_name))
    return changes


def _with_ssd(
    now: Largest,
    room: dict[str, int],
    speeds: Calibration,
    options: argparse.Namespace,
    device_name: str,
) -> Change:
    """What an SSD would bring: that of the current folder, where it is on one."""
    from . import capacity

    here = machine.file_system(".")
    if here.kind in KINDS and here.kind not in WRITES_ANEW:
        return Change("give it an SSD (--ssd-path): parameters and states then rest there")
    more = capacity.largest(
        {**room, "ssd": int(here.free_bytes * capacity.DISK_SHARE)},
        capacity.with_typical_disk(speeds),
        options,
        device_name,
    )
    size = more.parameters if more else 0
    return Change(
        f"give it an SSD: with what {Path.cwd()} has free ({format_size(here.free_bytes)}), "
        f"--ssd-path would make it {_billions(size)} parameters",
        size / now.parameters - 1,
    )


def _endurance(found: Sequence[Fact]) -> int | None:
    """Of all drives together, by what they have used up so far. None where one does not tell."""
    drives = [fact.figures for fact in found if fact.figures.get("path")]
    if not drives or not all(figures.get("used_percent") for figures in drives):
        return None
    return sum(100 * f["written_bytes"] // f["used_percent"] for f in drives)


def _written(size: int) -> str:
    """As strata.wrap() takes it, and no more."""
    return f"{size >> 30}GiB" if size >= 10 << 30 else f"{size >> 20}MiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _wrapped(text: str, indent: int) -> list[str]:
    return folded(text, COLUMNS, indent)
