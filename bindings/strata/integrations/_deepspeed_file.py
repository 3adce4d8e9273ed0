"""Reads a DeepSpeed configuration, for deepspeed.py: every value by its dotted key, with "auto"
replaced as Transformers' Trainer does.

    given = values({"bf16": {"enabled": "auto"}}, args)     # args: TrainingArguments, or None
    given["bf16.enabled"]                                   # as args.bf16
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .._config.paths import AnyPath, as_path, is_path
from .._errors import nearest
from ._deepspeed_keys import FORMER, KEYS, SECTIONS, known
from ._deepspeed_optim import STEPS, WARMUP_STEPS

AUTO = "auto"
NAMES_MAX = 20  # of a section: more are not listed in a message
# What Transformers' Trainer fills in for "auto", by key: from which of its arguments.
FROM_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
}


def values(config: AnyPath | Mapping[str, Any], args: Any | None) -> dict[str, Any]:
    """Values by their dotted keys. Raises as from_deepspeed() says."""
    given = _flat(_loaded(config))
    return {key: _resolved(key, value, args) for key, value in given.items()}


def _loaded(config: AnyPath | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not is_path(config):
        raise TypeError(f"config must be a path or a dictionary, not {type(config).__name__}")
    file = as_path(config, "config")
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON (comments are none either): {error}") from error
    if not isinstance(found, dict):
        raise TypeError(f"{file} holds a {type(found).__name__}, not a dictionary")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there more than once")
        found[name] = value
    return found


def _flat(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Values by their dotted keys. Raises ValueError for a key that DeepSpeed does not have."""
    found: dict[str, Any] = {}
    for written, value in config.items():
        name = FORMER.get(written, written) if not section else written
        key = f"{section}.{name}" if section else name
        if key in SECTIONS and isinstance(value, Mapping) and (value or key not in KEYS):
            found |= _flat(value, key)
        elif key in KEYS:
            found[key] = value
        elif key == "zero_optimization" and isinstance(value, bool):  # as older files say it
            found[f"{key}.stage"] = int(value)
        elif key in SECTIONS and value is not None:
            raise TypeError(f"{key} must be a dictionary, not {value!r}")
        elif key not in SECTIONS:
            raise ValueError(f"DeepSpeed has no key {key!r}: {_nearest(str(written), section)}")
    return found


def _nearest(name: str, section: str) -> str:
    """The end of a message: where the name belongs, or which one was probably meant."""
    homes = [key.rpartition(".")[0] for key in KEYS if key.rpartition(".")[2] == name]
    if homes:
        return f"it belongs in {' or '.join(repr(home) for home in homes if home) or 'no section'}"
    names = known(section)
    said = nearest(name, names)
    return "none is like it" if said.startswith("valid: ") and len(names) > NAMES_MAX else said


def _resolved(key: str, value: Any, args: Any | None) -> Any:
    """The value that "auto" stands for. Raises ValueError where nothing is known for it, and where
    a value is another than that of `args`, which the loop would follow."""
    if key in ("optimizer.params", "scheduler.params") and isinstance(value, Mapping):
        return {word: _resolved(f"{key}.{word}", each, args) for word, each in value.items()}
    fields, word = FROM_ARGUMENTS.get(key), key.rpartition(".")[2]
    if value == AUTO:
        if isinstance(KEYS.get(key), str) or word in (STEPS, "train_batch_size"):
            return value  # follows from the others, or from the length of the run, or is not needed
        if word == "warmup_min_lr":
            return 0.0
        if args is None:
            raise ValueError(f"{key} is 'auto': pass args=, the TrainingArguments of the run")
        if word == WARMUP_STEPS:
            return value
        if fields is None:
            raise ValueError(
                f"{key} is 'auto', for which TrainingArguments has nothing: give a value"
            )
    if fields is None or args is None:
        return value
    found = [getattr(args, field) for field in fields]
    expected = found if len(found) > 1 else found[0]
    if value != AUTO and (list(value) if isinstance(value, tuple) else value) != expected:
        raise ValueError(
            f"{key} is {value!r}, and {' and '.join(fields)} of args says {expected!r}: write "
            "'auto', or the same in both"
        )
    return expected
