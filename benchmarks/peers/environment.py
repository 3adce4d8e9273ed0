"""A virtual environment of DeepSpeed's own, beside the one that runs the benches.

python = environment.python(context)      # made now where it is missing; never in quick mode

It holds DeepSpeed and what only DeepSpeed needs. Everything else, PyTorch above all, comes from the
environment that runs the benches, by a .pth file: both sides of a comparison compute with the same
library. DeepSpeed's C++ parts are compiled here, for this processor, before anything is timed.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..common import ROOT, BenchError, Context

DEEPSPEED = "0.19.8"
FOLDER = (ROOT / "build/peers").resolve()
PYTHON = FOLDER / "bin/python"
READY = FOLDER / f"deepspeed-{DEEPSPEED}"  # written last
COMMAND = "./dev run python -m benchmarks.peers"
# Its optimizer, its SSD and its memory for collectives.
OPERATORS = ("CPUAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder")


def ready() -> bool:
    """Whether the environment is there, complete."""
    return READY.exists() and PYTHON.exists()


def variables(threads: int) -> Mapping[str, str]:
    """Environment variables of a child of either side: threads, DeepSpeed's device, and one rank
    that needs no launcher.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bindings")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
    }


def python(context: Context) -> Path:
    """The interpreter of the environment, which is made first where it is missing.

    Raises BenchError where that fails, and in quick mode, which does not use the network.
    """
    if not ready():
        if context.quick:
            raise BenchError(f"DeepSpeed {DEEPSPEED} is not installed: run {COMMAND}")
        make(context.say)
    return PYTHON


def make(say: Callable[[str], None]) -> None:
    """Installs DeepSpeed from PyPI and compiles its operators."""
    say(f"installing DeepSpeed {DEEPSPEED} into {FOLDER}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=False)
    packages = next(FOLDER.glob("lib/python*/site-packages"))
    shared = Path(torch.__file__).parent.parent
    (packages / "shared.pth").write_text(f"{shared}\n")
    pip = ("-m", "pip", "install", "--no-build-isolation", "--disable-pip-version-check")
    _run([*pip, f"deepspeed=={DEEPSPEED}"])
    say("compiling its operators: some minutes")
    for operator in OPERATORS:
        load = f"from deepspeed.ops.op_builder.cpu import {operator} as B; B().load()"
        _run(["-c", load])
    READY.touch()


def _run(arguments: list[str]) -> None:
    """Runs the environment's interpreter; BenchError with the end of what it said if it fails."""
    done = subprocess.run(
        [str(PYTHON), *arguments],
        env=variables(len(os.sched_getaffinity(0))),
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise BenchError(f"{PYTHON} {arguments[0]} {arguments[1]} failed:\n{tail}")
