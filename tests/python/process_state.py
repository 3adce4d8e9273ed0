"""Everything that is one for all of a process, and that a library has to leave as it is.

before = state()
...
assert changed(before, state()) == {}
"""

import gc
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

LIBC_SIGNALS = 0b11 << 31  # 32 and 33, which glibc takes with a process's first thread
RANDOM = ("random", "numpy", "torch")


def state() -> dict[str, Any]:
    """By name, what it is now."""
    found: dict[str, Any] = {}
    status = Path("/proc/self/status").read_text().splitlines()
    found["signals"] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    masks = [line.split() for line in status if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
    found["caught"] = [(name, int(mask, 16) & ~LIBC_SIGNALS) for name, mask in masks]
    found["environment"] = dict(os.environ)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found["limits"] = {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    found["processors"] = os.sched_getaffinity(0)
    found["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
    found["folder"] = Path.cwd()
    found["umask"] = [line for line in status if line.startswith("Umask")]
    found["locale"] = locale.setlocale(locale.LC_ALL)
    found["threads"] = [thread.name for thread in threading.enumerate()]
    found["warnings"] = [list(warnings.filters), warnings.showwarning]
    found["log"] = [(log.level, list(log.handlers)) for log in (logging.root, _log("strata"))]
    found["hooks"] = [sys.excepthook, sys.unraisablehook, threading.excepthook]
    found["traces"] = [sys.gettrace(), sys.getprofile(), threading.gettrace()]
    found["python"] = [sys.getswitchinterval(), sys.getrecursionlimit(), list(sys.path)]
    found["garbage"] = [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()]
    found["matplotlib"] = {key: dict.get(matplotlib.rcParams, key) for key in matplotlib.rcParams}
    found["pyplot"] = "matplotlib.pyplot" in sys.modules
    found["random"] = random.getstate()
    found["numpy"] = np.random.get_state()[1].tolist()  # type: ignore[index]
    found.update({f"torch {name}": value for name, value in _torch().items()})
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _log(name: str) -> logging.Logger:
    return logging.getLogger(name)


def _torch() -> dict[str, Any]:
    backends = torch.backends
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "defaults": [torch.get_default_dtype(), torch.get_default_device()],
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "autocast": [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()],
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        "profiler": torch._C._autograd._profiler_enabled(),
        "stacks": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
        "saved": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "onednn": backends.mkldnn.enabled,
        "cudnn": [getattr(backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")],
        "classes": [torch.nn.Module.__call__, torch.nn.Module.__setattr__, torch.Tensor.__add__],
        "generator": torch.get_rng_state().tolist(),
    }
