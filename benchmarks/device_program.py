"""Figures of benchmarks/device_copy.cpp, which measures without Python in between."""

import json
import subprocess
from collections.abc import Iterator

from .common import GIB, MIB, ROOT, BenchError, Context, Figure
from .device import HOST

PROGRAM = ROOT / "build/release/benchmarks/device_copy"
BYTES, QUICK_BYTES = GIB, 16 * MIB
PAGE_BYTES = 4 * MIB


def figures(context: Context, what: str) -> Iterator[Figure]:
    """What the program says of "copy" or "map". Targets are a GPU's: the host has none to reach."""
    if not PROGRAM.exists():
        raise BenchError(f"{PROGRAM} is not built")
    sizes = {
        "page-bytes": PAGE_BYTES,
        "bytes": QUICK_BYTES if context.quick else BYTES,
        "turns": context.rounds * 3,
    }
    command = [str(PROGRAM), what, "--device", context.device]
    for name, size in sizes.items():
        command += [f"--{name}", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(done.stderr.strip())
    for line in done.stdout.splitlines():
        figure = json.loads(line)
        if context.device == HOST:
            figure["target"] = None
        yield Figure(**figure)
