"""How fast the disks under some folders are: for commands that tell people, and need no torch.

    read, write, read_beside, write_beside = disk_speeds(["/mnt/nvme"], 4 << 20, "auto")

calibrate.py measures the same as lanes of a step, for planning.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core

SECONDS = 0.15  # that each way is measured
FILE_BYTES = 128 << 20


def disk_speeds(
    paths: Sequence[str], page_bytes: int, io_engine: str, depth: int = 0
) -> tuple[float, float, float, float]:
    """Bytes a second: read alone, written alone, and both at the same time. `depth`: requests in
    flight, 0: chosen. Raises StrataError where no file can be made, or the disk fails."""
    probe = _core.SsdProbe(list(paths), page_bytes, io_engine, FILE_BYTES, depth)
    read, write = probe.run("in", SECONDS)[0], probe.run("out", SECONDS)[1]
    return read, write, *probe.run("both", SECONDS)
