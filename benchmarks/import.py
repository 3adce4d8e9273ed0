"""What `import strata` adds to `import torch`, in processes that are new.

Public names are imported when they are first asked for. So there is a second figure, for all of
them: what a program pays that wraps, trains, saves and reports. About a third of it is one pass of
Python's garbage collector over the objects of torch. Each process imports torch, then strata, then
all that it has.
"""

# ruff: noqa: N999 (a bench's file has its name)

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .common import ROOT, BenchError, Context, Figure

TARGET_S = 0.15
CODE = """
import json, time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
import strata
times.append(time.perf_counter())
from strata import *
times.append(time.perf_counter())
print(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


def seconds() -> list[float]:
    """Of torch, of strata behind it, and of all its names behind that, in one new process."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": str(ROOT / "bindings")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"it cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    taken: list[float] = json.loads(done.stdout)
    return taken


def run(context: Context) -> Iterator[Figure]:
    """Yields medians: seconds of `import torch`, and what strata adds to them."""
    seconds()  # compiled to bytecode by now, and read from the disk
    rounds = []
    for turn in range(max(2, context.rounds)):
        rounds.append(seconds())
        context.say(f"round {turn + 1}: " + ", ".join(f"{s:.4f} s" for s in rounds[-1]))
    torch_s, strata_s, names_s = zip(*rounds, strict=True)
    added = [a + b for a, b in zip(strata_s, names_s, strict=True)]
    yield Figure("import", "torch", statistics.median(torch_s), "s")
    yield Figure("import", "strata_added", statistics.median(strata_s), "s", TARGET_S)
    yield Figure("import", "all_names_added", statistics.median(added), "s")
