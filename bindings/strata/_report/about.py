"""What a report is of: the model, the command that trained it, and the machine.

about.model(state)          # "LlamaForCausalLM, 171 M parameters"
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._config.device import HOST
from .._config.machine import processors
from .._config.sizes import format_size
from .._profiling.calibrate import processor

if TYPE_CHECKING:
    from .._runtime.wrapped import Wrapped


def model(state: Wrapped) -> str:
    """Its class, and how large it is."""
    count = sum(spec["numel"] for spec in state.config["params"])
    size = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    return f"{type(state.model).__name__}, {size} parameters"


def command() -> str:
    """What this process was started as; empty: by no command."""
    program, *arguments = sys.argv or [""]
    name = Path(program).name
    if name == "__main__.py":  # python -m PACKAGE
        name = Path(program).parent.name
    return shlex.join([name, *arguments]) if name else ""


def machine(stats: dict[str, Any]) -> str:
    """Processor, memory, and the device where it is another. `stats`: of the session."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [processor(), f"{processors()} processors", f"{format_size(memory)} of memory"]
    if (device := stats.get("device", HOST)) != HOST:
        parts.append(device)
    return ", ".join(parts)
