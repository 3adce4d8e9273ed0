"""What the disk can do, by fio: the bound of everything that pages to the SSD."""

import json
import shutil
import subprocess
from pathlib import Path

from .common import BenchError


def mixed_bandwidth(folder: Path, file_bytes: int, seconds: int) -> float:
    """Bytes per second, reads plus writes, of fio with io_uring, O_DIRECT and 4 MiB blocks, half of
    them reads. The file is written first: reads of blocks never written cost the disk nothing.
    """
    if shutil.which("fio") is None:
        raise BenchError("fio is not installed")
    path = folder / "fio.data"
    shared = [
        "fio",
        "--name=mixed",
        f"--filename={path}",
        f"--size={file_bytes}",
        "--ioengine=io_uring",
        "--direct=1",
        "--bs=4M",
        "--iodepth=16",
        "--output-format=json",
    ]
    if not path.exists():
        _fio([*shared, "--rw=write", "--end_fsync=1"])
    mixed = ["--rw=rw", "--rwmixread=50", "--time_based", f"--runtime={seconds}"]
    job = _fio([*shared, *mixed])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def _fio(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    return json.loads(done.stdout[done.stdout.index("{") :])
