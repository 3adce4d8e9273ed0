"""The random states a run draws from, as JSON values: torch on the CPU and on CUDA, random, numpy.

rng.restore(rng.capture())
"""

import base64
import random
from typing import Any

import numpy as np
import torch

from .._schema import FormError

CUDA_STATE_BYTES = 16
NUMPY_KEYS = 624


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


def check(states: dict[str, Any]) -> None:
    """Raises FormError for what could not be restored: all of it is tried on generators of its own.
    REQUIRES: `states` have the types of manifests.py."""
    for name, attempt in (
        ("torch", lambda: torch.Generator().set_state(_tensor(states["torch"]))),
        ("cuda", lambda: _check_cuda(states["cuda"])),
        ("python", lambda: _check_python(*states["python"])),
        ("numpy", lambda: _check_numpy(*states["numpy"])),
    ):
        try:
            attempt()
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            why = f"rng: {name!r} is no state of its generator ({error!s:.80})"
            raise FormError(why) from error


def _check_cuda(states: list[str]) -> None:
    """Without a GPU to try it on: a seed of 8 bytes, and where the run was, a multiple of 4."""
    for text in states:
        state = bytes(_tensor(text).tolist())
        if len(state) != CUDA_STATE_BYTES or int.from_bytes(state[8:], "little") % 4:
            raise ValueError(f"{len(state)} bytes")


def _check_python(version: int, keys: list[int], gauss: float | None) -> None:
    random.Random().setstate((version, tuple(keys), gauss))


def _check_numpy(name: str, keys: list[int], place: int, has_gauss: int, cached: float) -> None:
    # numpy itself would take any place, and read there.
    if len(keys) != NUMPY_KEYS or not 0 <= place <= NUMPY_KEYS or has_gauss not in (0, 1):
        raise ValueError("out of range")
    state = (name, np.array(keys, dtype=np.uint32), place, has_gauss, float(cached))
    np.random.RandomState().set_state(state)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
