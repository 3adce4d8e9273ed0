"""Codes of frozen pages to bfloat16, in plain memory, against memcpy() of what comes out: what
benchmarks/dequantise_loop.cpp prints.
"""

import json
import subprocess
from collections.abc import Iterator

from .common import ROOT, BenchError, Context, Figure

ELEMENTS = 100 << 20  # far beyond every cache
LOOP = ROOT / "build/release/benchmarks/dequantise_loop"


def run(context: Context) -> Iterator[Figure]:
    """Yields GB/s of output and its share of memcpy()'s rate, of each form and instruction set."""
    if not LOOP.exists():
        raise BenchError(f"{LOOP} is not built")
    elements = 1 << 20 if context.quick else ELEMENTS
    command = [str(LOOP), "--elements", str(elements), "--turns", str(context.rounds * 3)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        yield Figure(**json.loads(line), better="higher")
