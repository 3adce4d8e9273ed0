"""Which options make a run what it is: those that cannot change when it is resumed. No torch.

    differences(before, now)       # ["--seed was 0 and is 5 now"]; options by name

All others may change: where a run lives, how it is evaluated, kept and shown, and --steps. Its data
are told by their contents (origin.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..._config.choices import MODEL_SIZES
from ..._config.sizes import parse_size
from ..._config.update_modes import parse_update
from ..lora import parse_lora

# How other words for the same are told.
IDENTITY: dict[str, Callable[[Any], Any]] = {
    "model": lambda name: name if name in MODEL_SIZES else Path(name).resolve(),
    "data_limit": parse_size,
    "held_out": float,
    "sequence": int,
    "vocabulary": int,
    "lora": parse_lora,
    "dtype": str,
    "state_dtype": str,
    "frozen": str,
    "batch": int,
    "accumulation": int,
    "lr": float,
    "warmup": int,
    "update": parse_update,
    "weight_decay": float,
    "max_grad_norm": float,
    "seed": int,
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words."""
    found = []
    for name, read in IDENTITY.items():
        old, new = (None if told[name] is None else read(told[name]) for told in (before, now))
        if old != new:
            was, is_ = ("not given" if told[name] is None else told[name] for told in (before, now))
            found.append(f"--{name.replace('_', '-')} was {was} and is {is_} now")
    return found
