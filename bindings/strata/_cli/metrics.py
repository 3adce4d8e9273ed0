"""The figures of a run, one JSON object per line, and the picture of them.

    metrics = Metrics(Path("run/metrics.jsonl"), keep=False)
    metrics.add_step(record)
    metrics.add_evaluation(step=10, seconds=63.0, loss=5.1)

A line with `loss` is a step (the fields of StepRecord), one with `held_out_loss` an evaluation.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .._report import charts
from .finetune_view import StepRecord

Record = dict[str, Any]


class Metrics:
    """Appends to a file at once, and remembers what is in it."""

    def __init__(self, path: Path, keep: bool) -> None:
        """`keep` the lines of an earlier run; a line that was cut short is dropped."""
        self._path = path
        self._records: list[Record] = []
        if keep and path.exists():
            self._records = [r for line in path.read_text().splitlines() if (r := _parse(line))]
        self._rewrite()

    @property
    def steps(self) -> list[Record]:
        """One record per step, oldest first."""
        return [record for record in self._records if "loss" in record]

    @property
    def evaluations(self) -> list[Record]:
        """One record per evaluation, oldest first."""
        return [record for record in self._records if "held_out_loss" in record]

    def add_step(self, record: StepRecord) -> None:
        """Appends a step."""
        self._append(dataclasses.asdict(record))

    def add_evaluation(self, step: int, seconds: float, loss: float) -> None:
        """Appends an evaluation made after `step` steps."""
        self._append({"step": step, "seconds": seconds, "held_out_loss": loss})

    def forget_after(self, step: int) -> None:
        """Drops what a killed run did after its last checkpoint."""
        self._records = [record for record in self._records if record["step"] <= step]
        self._rewrite()

    def draw(self, path: Path, budgets: dict[str, int], title: str) -> None:
        """Writes the picture."""
        charts.draw(self.steps, self.evaluations, budgets, path, title)

    def _append(self, record: Record) -> None:
        self._records.append(record)
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _rewrite(self) -> None:
        self._path.write_text("".join(json.dumps(record) + "\n" for record in self._records))


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
