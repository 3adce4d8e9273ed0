"""Programs that measure a device without Python in between: device_copy.cpp, device_update.cpp."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .common import GIB, MIB, ROOT, BenchError, Context, Figure
from .device import HOST

FOLDER = ROOT / "build/release/benchmarks"
COPY, UPDATE = FOLDER / "device_copy", FOLDER / "device_update"
BYTES, QUICK_BYTES = GIB, 16 * MIB
PAGE_BYTES = 4 * MIB


def run(
    program: Path, context: Context, sizes: Mapping[str, int], what: str = ""
) -> list[dict[str, Any]]:
    """What a program prints. BenchError, with its own words, where it cannot."""
    if not program.exists():
        raise BenchError(f"{program} is not built")
    command = [str(program), *([what] if what else []), "--device", context.device]
    for name, size in sizes.items():
        command += [f"--{name}", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(done.stderr.strip())
    return [json.loads(line) for line in done.stdout.splitlines()]


def figures(context: Context, what: str) -> Iterator[Figure]:
    """What is said of "copy" or "map". Targets are a GPU's: the host has none to reach."""
    sizes = {
        "page-bytes": PAGE_BYTES,
        "bytes": QUICK_BYTES if context.quick else BYTES,
        "turns": context.rounds * 3,
    }
    for figure in run(COPY, context, sizes, what):
        if context.device == HOST:
            figure["target"] = None
        yield Figure(**figure)
