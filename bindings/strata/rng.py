"""The random states a run draws from, as JSON values: torch on the CPU and on CUDA, random, numpy.

rng.restore(rng.capture())
"""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of this moment."""
    generator, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    # A run that never used a GPU has drawn nothing there, and asking would make a context on each.
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in states],
        "python": list(random.getstate()),
        "numpy": [generator, np.asarray(keys).tolist(), place, has_gauss, cached],
    }


def restore(states: dict[str, Any]) -> None:
    """Continues from what `capture` returned, on the GPUs that there are."""
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), device)
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    name, values, place, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(values, dtype=np.uint32), place, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
