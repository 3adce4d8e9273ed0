"""What the "optimizer" and "scheduler" sections of a DeepSpeed configuration name, for
deepspeed.py: the class of torch or strata that computes the same, and its arguments.

    kind, arguments = optimizer_of("Adam", {"lr": 1e-4})      # torch.optim.AdamW: as DeepSpeed does
    kind, arguments = schedule_of("WarmupLR", {"warmup_num_steps": 100})       # Warmup

Both raise ValueError for what has no equal here, with what to use instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .._errors import check_choice, nearest
from ..optim import Lion

Made = tuple[Callable[..., Any], dict[str, Any]]  # a class and its arguments

# DeepSpeed's own classes, by what it makes of their names, with its defaults where torch's differ.
_OWN: dict[str, Made] = {
    "adam": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "adagrad": (torch.optim.Adagrad, {}),
    "lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}),
}
_NO_COMPRESSION = "AdamW: one process sends no gradients that could be compressed"
_BY_GROUP = "AdamW or SGD, with a learning rate for each group"
_INSTEAD = {
    "onebitadam": _NO_COMPRESSION,
    "zerooneadam": _NO_COMPRESSION,
    "lamb": "AdamW, or Lion",
    "onebitlamb": "AdamW, or Lion",
    "muadam": _BY_GROUP,
    "muadamw": _BY_GROUP,
    "musgd": _BY_GROUP,
    "muon": "AdamW: Muon needs whole matrices, and strata updates pieces of them",
    "onecycle": "torch.optim.lr_scheduler.OneCycleLR, or CyclicLR",
    "lrrangetest": "torch.optim.lr_scheduler.LinearLR, or LambdaLR",
}
# Arguments that only DeepSpeed's classes take: the values that change nothing, and what else to do.
_EXTRA: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_correction": ((True,), "leave it out: strata always corrects the bias"),
    "amsgrad": ((False,), "leave it out: strata has no amsgrad"),
    "set_grad_none": ((True, False), ""),
}


def optimizer_of(name: str, given: Mapping[str, Any]) -> Made:
    """The class, and its arguments except the parameters."""
    _refuse(name)
    arguments, own = dict(given), name.lower()
    if "max_grad_norm" in arguments:
        raise ValueError('max_grad_norm: write "gradient_clipping" at the top of the file')
    if own not in _OWN:
        kind = _class_of_torch(torch.optim, torch.optim.Optimizer, "optimizer", name, ("Lion",))
        return kind, _checked(name, kind, arguments)
    kind, defaults = _OWN[own]
    if own in ("adam", "adamw"):
        # DeepSpeed's Adam decouples weight decay unless it is told otherwise. Its torch_adam is
        # torch's class, with that one's defaults.
        if not arguments.pop("adam_w_mode", True) and own == "adam":
            kind = torch.optim.Adam
        if arguments.pop("torch_adam", False):
            defaults = {}
    for word, (harmless, instead) in _EXTRA.items():
        if (value := arguments.pop(word, harmless[0])) not in harmless:
            raise ValueError(f"{word}={value}: {instead}")
    return kind, _checked(name, kind, {**defaults, **arguments})


# The steps of the whole run, and of its beginning: "auto" until they are known.
STEPS, WARMUP_STEPS = "total_num_steps", "warmup_num_steps"
# Arguments of DeepSpeed's schedules with their defaults. None: the optimizer's own rate, and for
# STEPS that there is no default.
_WARMUP = {"warmup_min_lr": 0.0, WARMUP_STEPS: 1000, "warmup_type": "log"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_WARMUP, "warmup_max_lr": None},
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": 0.001, STEPS: None},
    "WarmupCosineLR": {
        STEPS: None, "warmup_min_ratio": 0.0, WARMUP_STEPS: 1000, "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}  # fmt: skip


def schedule_of(name: str, given: Mapping[str, Any]) -> Made:
    """The class, and its arguments except the optimizer."""
    _refuse(name)
    if name not in SCHEDULES:
        kind = _class_of_torch(
            torch.optim.lr_scheduler, LRScheduler, "scheduler", name, tuple(SCHEDULES)
        )
        return kind, _checked(name, kind, given)
    _check_words(name, given, SCHEDULES[name])
    check_choice("warmup_type", given.get("warmup_type", "log"), ("log", "linear"))
    return Warmup, {"name": name, **given}


def _refuse(name: str) -> None:
    if name.lower() in _INSTEAD:
        raise ValueError(f"type {name}: take {_INSTEAD[name.lower()]}")


def _class_of_torch(home: Any, base: type, what: str, name: str, own: tuple[str, ...]) -> Any:
    kinds = {n: k for n, k in vars(home).items() if isinstance(k, type) and issubclass(k, base)}
    kinds.pop(base.__name__, None)
    if name not in kinds:
        raise ValueError(f"unknown {what} {name!r}: {nearest(name, [*own, *sorted(kinds)])}")
    return kinds[name]


def _checked(name: str, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    _check_words(name, given, list(inspect.signature(kind).parameters)[1:])
    betas = given.get("betas")  # JSON has a list of them
    return {**given, "betas": tuple(betas)} if isinstance(betas, list) else dict(given)


def _check_words(name: str, given: Mapping[str, Any], valid: Any) -> None:
    for word in given:
        if word not in valid:
            raise ValueError(f"{name} has no argument {word!r}: {nearest(word, valid)}")


class Warmup(LRScheduler):
    """DeepSpeed's schedules that warm up: WarmupLR stays at the top rate then, WarmupDecayLR falls
    in a line to 0, WarmupCosineLR in half a cosine.

    The rate of every step is DeepSpeed's: its schedules are one step late, so the first two
    steps of a run have the smallest rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, **arguments: Any) -> None:
        """`name` and `arguments` as in the file. Raises ValueError for a missing one."""
        self.values = {**SCHEDULES[name], **arguments}
        if STEPS in self.values and self.values[STEPS] is None:
            raise ValueError(f"{name} needs {STEPS}")
        self.warmup_steps = max(2, int(self.values[WARMUP_STEPS]))
        self.total_steps = int(self.values.get(STEPS, 0))
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Called by torch: the rates of the step to come, by group."""
        return [self._rate(float(base), self.last_epoch - 1) for base in self.base_lrs]

    def _rate(self, base: float, step: int) -> float:
        cosine = "cos_min_ratio" in self.values
        least = self.values["warmup_min_ratio" if cosine else "warmup_min_lr"]
        most = 1.0 if cosine else self.values["warmup_max_lr"]
        if most is None:
            most = base
        if step < 0:
            return 0.0 if cosine else least
        if step < self.warmup_steps:
            share = step / self.warmup_steps
            if self.values["warmup_type"] == "log":
                share = math.log(step + 1) / math.log(self.warmup_steps)
            rate = least + (most - least) * share
        else:
            length = max(1, self.total_steps - self.warmup_steps)
            if cosine:
                done = min(1.0, (step - self.warmup_steps + 1) / length)
                final = self.values["cos_min_ratio"]
                rate = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
            else:
                falls = STEPS in self.values
                left = max(0.0, (self.total_steps - step) / length) if falls else 1.0
                rate = least + (most - least) * left
        return base * rate if cosine else rate
