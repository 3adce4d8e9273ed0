"""Adapters instead of all parameters: what `--lora` says, and how they come into a model.

parse_lora("r=8,targets=q_proj+v_proj")     # {"r": 8, "target_modules": ["q_proj", "v_proj"]}
add_adapters(model, "r=8")                  # the model is on the meta device, its base frozen
"""

from collections.abc import Callable
from typing import Any

from .._config.choices import number, positive
from .._errors import nearest


def _some(text: str) -> float:
    value = number(text)
    if not value:
        raise ValueError(f"{text!r} switches the adapters off")
    return value


def _share(text: str) -> float:
    value = number(text)
    if value >= 1:
        raise ValueError(f"{text!r} is not a share below 1")
    return value


def _names(text: str) -> list[str]:
    names = text.split("+")
    if not all(names):
        raise ValueError(f"{text!r} is not a list such as q_proj+v_proj")
    return names


FACTOR = 2  # alpha, in multiples of r, unless it is given
# What is told → what PEFT calls it, and how it is read.
WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "r": ("r", positive),
    "alpha": ("lora_alpha", _some),
    "dropout": ("lora_dropout", _share),
    "targets": ("target_modules", _names),
}


def parse_lora(text: str) -> dict[str, Any]:
    """Keywords of peft.LoraConfig. Raises ValueError, with the nearest word."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        word, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"{part!r} is not a setting such as r=8")
        if word not in WORDS:
            raise ValueError(f"unknown setting {word!r}: {nearest(word, WORDS)}")
        name, read = WORDS[word]
        if name in found:
            raise ValueError(f"{text!r} gives {word} twice")
        try:
            found[name] = read(value)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from error
    if "r" not in found:
        raise ValueError(f"{text!r} has no r=")
    return {"lora_alpha": FACTOR * found["r"], **found}


def add_adapters(model: Any, text: str) -> None:
    """Puts adapters into a model of Transformers on the meta device, and freezes the rest: they get
    first values where the model is wrapped. Raises ValueError where it has no such modules."""
    import torch
    from peft import LoraConfig

    with torch.device("meta"):
        model.add_adapter(LoraConfig(task_type="CAUSAL_LM", **parse_lora(text)))
