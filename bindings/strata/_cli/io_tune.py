"""`strata io-tune`: measures this machine by hand and remembers what it found.

strata io-tune --ssd-path /mnt/nvme0 /mnt/nvme1 --page-size 4MiB --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._config import device, machine
from .._config.choices import SPEED_OF
from .._config.sizes import format_size
from .._planning import budget_check
from .._planning.forecast import LANE_NAMES
from .._profiling.calibrate import Calibration, calibration
from .._profiling.disk_speed import disk_speeds
from .._profiling.probes import LANES
from .._report.report_text import table
from .planner import setup_of

SWEEP_PAGES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
SWEEP_DEPTHS = (4, 16, 64)
IN_FLIGHT_MAX = 256 << 20  # bytes of host memory for buffers


def run(options: argparse.Namespace) -> int:
    """Returns 0. Says what cannot be measured, and raises where that is a disk or a device that was
    asked for. `options`: of options.io_tune_parser()."""
    options.device = device.choose(options.device)
    setup = setup_of(options, options.page_size)
    for text in budget_check.file_systems(options.ssd_path):
        print(text)
    if options.ssd_path:
        print("\ndisks: GB/s by page size and requests in flight")
        print(f"{sweep(options.ssd_path, options.io_engine)}\n")
    print(device.description(options.device) or machine.processor_name())
    print(
        f"lanes with pages of {format_size(options.page_size)}: alone, and what is left beside "
        "others"
    )
    print(lanes_table(calibration(setup, refresh=True)))
    return 0


def sweep(paths: Sequence[str], io_engine: str) -> str:
    """Bandwidth of the disks by page size and requests in flight."""
    rows = [["page", "in flight", "read", "write", "read beside write", "write beside read"]]
    for page in SWEEP_PAGES:
        for depth in SWEEP_DEPTHS:
            if page * depth > IN_FLIGHT_MAX:
                continue
            speeds = disk_speeds(paths, page, io_engine, depth)
            rows.append([format_size(page), str(depth), *(f"{s / 1e9:.2f}" for s in speeds)])
    return table(rows)


def lanes_table(found: Calibration) -> str:
    """Every lane alone, and the share of its speed that it keeps beside each other one."""
    costs = found.costs
    speeds = {
        lane: f"{getattr(costs, name) / 1e9:.2f} {'G/s' if lane == 'update' else 'GB/s'}"
        for lane, name in SPEED_OF.items()
    }
    speeds["compute"] = f"{found.flops_s / 1e9:,.{0 if found.flops_s >= 1e11 else 1}f} GFLOP/s"
    without_disk = not (costs.read_bytes_s or costs.write_bytes_s)
    shown = [lane for lane in LANES if lane not in ("read", "write") or not without_disk]
    rows = [["lane", "alone", *shown]]
    for lane in shown:
        cells = [
            ""
            if lane == other or {lane, other} & set(found.typical)
            else f"{100 * costs.slow[lane][other]:.0f} %"
            for other in shown
        ]
        typical = " (typical)" if lane in found.typical else ""
        rows.append([LANE_NAMES[lane], speeds[lane] + typical, *cells])
    return table(rows)
