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
from ._deepspeed_keys import FORMER, KEYS, NOT_NEEDED, SECTIONS, known
from ._deepspeed_optim import STEPS

AUTO = "auto"
NAMES_MAX = 20  # of a section: more are not listed in a message
# What Transformers' Trainer fills in for "auto", by key: from which of its arguments.
FROM_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
}
PARAMS_FROM_ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "optimizer.params": {
        "lr": ("learning_rate",),
        "betas": ("adam_beta1", "adam_beta2"),
        "eps": ("adam_epsilon",),
        "weight_decay": ("weight_decay",),
    },
    "scheduler.params": {"warmup_max_lr": ("learning_rate",)},
}
WARMUP_STEPS = "warmup_num_steps"  # known, as STEPS, when the length of the run is


def values(config: AnyPath | Mapping[str, Any], args: Any | None) -> dict[str, Any]:
    """Values by their dotted keys. Raises as from_deepspeed() says."""
    given = _flat(_read(config))
    _resolve(given, args)
    return given


def _read(config: AnyPath | Mapping[str, Any]) -> Mapping[str, Any]:
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
    found = dict(pairs)
    for name in found:
        if sum(other == name for other, _ in pairs) > 1:
            raise ValueError(f"{name!r} stands there more than once")
    return found


def _flat(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Values by their dotted keys. Raises ValueError for a key that DeepSpeed does not have."""
    found: dict[str, Any] = {}
    for written, value in config.items():
        name = FORMER.get(written, written) if not section else written
        path = f"{section}.{name}" if section else name
        if path in SECTIONS and isinstance(value, Mapping) and (value or path not in KEYS):
            found |= _flat(value, path)
        elif path in KEYS:
            found[path] = value
        elif path in SECTIONS and value is None:
            continue
        elif path == "zero_optimization" and isinstance(value, bool):  # as older files say it
            found[f"{path}.stage"] = int(value)
        elif path in SECTIONS:
            raise TypeError(f"{path} must be a dictionary, not {value!r}")
        else:
            raise ValueError(f"DeepSpeed has no key {path!r}: {_nearest(str(written), section)}")
    return found


def _nearest(name: str, section: str) -> str:
    """The end of a message: where the name belongs, or which one was probably meant."""
    homes = [path.rpartition(".")[0] for path in KEYS if path.rpartition(".")[2] == name]
    if homes:
        return f"it belongs in {' or '.join(repr(home) for home in homes if home) or 'no section'}"
    names = known(section)
    said = nearest(name, names)
    return "none is like it" if said.startswith("valid: ") and len(names) > NAMES_MAX else said


def _resolve(given: dict[str, Any], args: Any | None) -> None:
    """Replaces "auto". Raises ValueError where nothing is known for it, and where a value is
    another than that of `args`, which the loop would follow."""
    for path, value in given.items():
        fields = FROM_ARGUMENTS.get(path)
        if path in PARAMS_FROM_ARGUMENTS and isinstance(value, Mapping):
            known_params = PARAMS_FROM_ARGUMENTS[path]
            given[path] = {
                word: _value(f"{path}.{word}", each, known_params.get(word), args)
                for word, each in value.items()
            }
        elif fields is not None or (value == AUTO and KEYS[path].verdict != NOT_NEEDED):
            given[path] = _value(path, value, fields, args)


def _value(path: str, value: Any, fields: tuple[str, ...] | None, args: Any | None) -> Any:
    """What stands for `value`. `fields`: of `args`; None: no field of it says anything."""
    word = path.rpartition(".")[2]
    auto = value == AUTO
    if auto and word in (STEPS, "train_batch_size"):
        return value  # follows from the others, or from the length of the run
    if auto and word == "warmup_min_lr":
        return 0.0
    if auto and args is None:
        raise ValueError(f"{path} is 'auto': pass args=, the TrainingArguments of the run")
    if auto and word == WARMUP_STEPS:
        return value
    if auto and fields is None:
        raise ValueError(f"{path} is 'auto', for which TrainingArguments has nothing: give a value")
    if fields is None or args is None:
        return value
    values = [getattr(args, field) for field in fields]
    expected = values if len(values) > 1 else values[0]
    if not auto and (list(value) if isinstance(value, tuple) else value) != expected:
        raise ValueError(
            f"{path} is {value!r}, and {' and '.join(fields)} of args says {expected!r}: write "
            "'auto', or the same in both"
        )
    return expected
