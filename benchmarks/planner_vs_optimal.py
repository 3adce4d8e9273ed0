"""The planner's makespan against the best of all plans, on small random traces, as the test suite
finds it by trying them all.
"""

import os
import re
import subprocess
from collections.abc import Iterator

from .common import ROOT, BenchError, Context, Figure

BINARY = ROOT / "build" / "release" / "tests" / "planner_suites"
LINE = re.compile(r"planner-vs-optimal seeds=(\d+) .*median=([\d.]+) worst=([\d.]+)")
SEEDS = 400
MEDIAN_MAX, WORST_MAX = 1.03, 1.15


def run(context: Context) -> Iterator[Figure]:
    """Yields the median and the worst ratio."""
    if not BINARY.exists():
        raise BenchError("the test binary is not built: run ./dev test first")
    seeds = str(60 if context.quick else SEEDS)
    done = subprocess.run(
        [BINARY, "plan_optimal"], capture_output=True, text=True, check=False,
        env={**os.environ, "STRATA_SEEDS": seeds},
    )  # fmt: skip
    found = LINE.search(done.stdout)
    if found is None:
        raise BenchError(f"the test said nothing: {done.stdout[-500:]}{done.stderr[-500:]}")
    yield Figure("planner-vs-optimal", "median", float(found[2]), "ratio", MEDIAN_MAX, 1.0)
    yield Figure("planner-vs-optimal", "worst", float(found[3]), "ratio", WORST_MAX, 1.0)
