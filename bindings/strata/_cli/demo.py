"""`strata demo`: a fixed run of `strata finetune` that needs nothing but this machine.

A Llama of 112 M parameters learns Python from the standard library's own sources. Its parameters
alone take 213 MiB in 16 bits, its whole training state 1.5 GiB; the device may hold 192 MiB, for
parameters, activations and PyTorch's own memory together, and the optimizer's state rests on the
disk.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .finetune import options as options

SSD_PATH = "runs/demo-ssd"

PRESET: dict[str, Any] = {
    "model": "llama-110m",
    "data": [sysconfig.get_path("stdlib")],
    "data_limit": "8MB",
    "output": "runs/demo",
    "overwrite": True,
    "device_memory": "192MiB",
    "host_memory": "384MiB",
    "ssd_memory": "2GiB",
    "ssd_path": [SSD_PATH],
    "steps": 100,
    "batch": 4,
    "sequence": 256,
    "lr": 6e-4,
    "warmup": 10,
    "eval_every": 20,
    "eval_windows": 16,
    "prompt": "def read_lines(path):\n",
    "generate": 64,
}


def parse(arguments: Sequence[str]) -> options.Options:
    """The demo; any option of finetune may be given to change it."""
    parser = options.Parser(prog="strata demo", description=__doc__)
    options.add_arguments(parser)
    parser.set_defaults(**PRESET)
    Path(SSD_PATH).mkdir(parents=True, exist_ok=True)
    return options.finish(parser, arguments)
