"""What the disk can do, by fio or plain reads: the bound of everything that pages to the SSD."""

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .common import BenchError

READERS = 8


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


def read_seconds(places: Sequence[tuple[Path, int, int]]) -> float:
    """Seconds to read these parts of files, by offset and bytes, with O_DIRECT and some threads:
    what the disk takes, without a look at the bytes."""
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {p for p, *_ in places}}

    def read(mine: Sequence[tuple[Path, int, int]]) -> None:
        with mmap.mmap(-1, max(size for *_, size in places)) as memory:
            for path, offset, size in mine:
                if os.preadv(files[path], [memoryview(memory)[:size]], offset) != size:
                    raise BenchError(f"{path} is too short")

    begin = time.perf_counter()
    try:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, [places[i::READERS] for i in range(READERS)]))
    finally:
        for file in files.values():
            os.close(file)
    return time.perf_counter() - begin


def _fio(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    return json.loads(done.stdout[done.stdout.index("{") :])
