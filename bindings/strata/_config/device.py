"""Which device a model computes on, and what there is of it.

name = choose("auto", model)          # "host", or "cuda:0" where that can be used
device = torch_device(name)           # what tensors of the session are on
free_bytes(name)                      # of a GPU; None on the host, which shares its memory
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

import torch
from torch import nn

from .. import _core
from .._errors import StrataError
from . import kernel, machine
from .choices import HOST, parse_device
from .launched import processes_started
from .sizes import format_size

PROCESSORS_LEFT = 2  # for Python, autograd and the thread that moves pages

log = logging.getLogger("strata")


def choose(wanted: str | torch.device, model: nn.Module | None = None) -> str:
    """The core's name of the device that is meant: "host" or "cuda:N".

    "auto" is the GPU that the model is on, else the process's own, else the host: a warning says
    why, where there is a GPU. "cuda" is the process's own. Raises StrataError, with the reason,
    where one is asked for that cannot be used.
    """
    parse(wanted)
    held = model.parameters() if model is not None else ()
    there = next((p.device for p in held if p.is_cuda), None)
    if wanted == "auto":
        if there is not None:
            return str(there)
        if not (reason := why_not(own := _own_gpu())):
            return own
        # Elsewhere nobody wants to hear of drivers.
        if kernel.shows_gpus() or torch.cuda.is_available():
            log.warning("device='auto' is the host: %s", reason)
        return HOST
    name = _own_gpu() if str(wanted) == "cuda" else parse(wanted)
    if name != HOST and (reason := why_not(name)):
        raise StrataError(f"device={str(wanted)!r} cannot be used: {reason}")
    return name


def _own_gpu() -> str:
    """The GPU of a process that does not say which: the one that torch.cuda.set_device() chose; of
    several processes that torchrun started, where that is the first one or none, the one with the
    process's number on its machine."""
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if chosen == 0 and processes_started() > 1 and (count := torch.cuda.device_count()):
        chosen = int(os.environ.get("LOCAL_RANK", "0")) % count
    return f"cuda:{chosen}"


def parse(given: str | torch.device) -> str:
    """The core's name of what the user wrote; "auto" as it is. Raises TypeError or ValueError."""
    if not isinstance(given, str | torch.device):
        raise TypeError(f"device must be 'auto', 'host', 'cuda:0' or a torch.device, not {given!r}")
    return parse_device(str(given))


def why_not(name: str) -> str:
    """Why a GPU cannot be used, and what to do; "" where it can."""
    if reason := _core.device_error(name):
        return reason
    if not torch.cuda.is_available():
        return (
            f"this PyTorch ({torch.__version__}) cannot use GPUs: install a build with CUDA, or "
            "pass device='host'"
        )
    return ""


def description(name: str) -> str:
    """Which GPU it is, and what drives it; "" for the host. Raises StrataError where it cannot be
    used."""
    return "" if name == HOST else _core.device_description(name)


def torch_device(name: str) -> torch.device:
    """What torch calls it."""
    return torch.device("cpu" if name == HOST else name)


def free_bytes(name: str) -> int | None:
    """What a GPU has free now. What PyTorch keeps in reserve is given back for it."""
    if name == HOST:
        return None
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(torch_device(name))[0])


def check_budget(name: str, byte_count: int, free: int, model: nn.Module) -> None:
    """Raises StrataError where a budget is more than the `free` bytes that a GPU has."""
    if byte_count <= free:
        return
    there = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    raise StrataError(
        f"the device budget is {format_size(byte_count)}, and {name} has {format_size(free)} free: "
        f"device={free} is the most that would do"
        + (
            f"; the model takes {format_size(there)} beside it until it is wrapped, and would not "
            "on the CPU"
            if there
            else ""
        )
    )


def say_slow_dtypes(name: str, dtypes: Collection[str]) -> None:
    """Warns where a processor without arithmetic in bfloat16 is to compute with it. `dtypes`: of
    the model's parameters, by the core's names."""
    if (
        name == HOST
        and "bfloat16" in dtypes
        and not machine.has_bfloat16(machine.processor_flags())
    ):
        log.warning(
            "this processor has no arithmetic in bfloat16: forward and backward take many times as "
            "long as in float32. Pass dtype=torch.float32, for twice the memory"
        )


def compute_threads(name: str) -> int:
    """Processors that workers leave free for computation, or for launching it on a GPU."""
    return torch.get_num_threads() if name == HOST else PROCESSORS_LEFT
