"""What the "optimizer" and "scheduler" sections of a DeepSpeed configuration name, for
deepspeed.py: the class of torch or strata that computes the same, and its arguments.

    kind, arguments = optimizer_of("Adam", {"lr": 1e-4})      # torch.optim.AdamW: as DeepSpeed does
    scheduler = Warmup(optimizer, "WarmupLR", {"warmup_num_steps": 100})

Both raise ValueError for what has no equal here, with what to use instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .._errors import nearest
from ..optim import Lion

# DeepSpeed's own classes, by what it makes of their names, with its defaults where torch's differ.
_OWN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "adagrad": (torch.optim.Adagrad, {}),
    "lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}),
}
_WITHOUT_EQUAL = {
    **dict.fromkeys(
        ("onebitadam", "zerooneadam"),
        "AdamW: one process sends no gradients that could be compressed",
    ),
    **dict.fromkeys(("lamb", "onebitlamb"), "AdamW, or Lion"),
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "AdamW or SGD, with a learning rate for each group"
    ),
    "muon": "AdamW: Muon needs whole matrices, and strata updates pieces of them",
}
# Arguments that only DeepSpeed's classes take: the values that change nothing, and what else to do.
_EXTRA: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_correction": ((True,), "leave it out: strata always corrects the bias"),
    "amsgrad": ((False,), "leave it out: strata has no amsgrad"),
    "set_grad_none": ((True, False), ""),
}


def optimizer_of(
    name: str, given: Mapping[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class, and its arguments but for the parameters.

    Raises ValueError for a class or an argument that has no equal, and for an unknown one.
    """
    arguments = dict(given)
    if "max_grad_norm" in arguments:
        raise ValueError('max_grad_norm: write "gradient_clipping" at the top of the file')
    folded = name.lower()
    if folded in _WITHOUT_EQUAL:
        raise ValueError(f"type {name}: take {_WITHOUT_EQUAL[folded]}")
    if folded in _OWN:
        kind, defaults = _OWN[folded]
        if folded in ("adam", "adamw"):
            kind, defaults = _adam(folded, arguments, defaults)
        _take_extra(arguments)
        arguments = {**defaults, **arguments}
    else:
        kind = _torch_class(name)
    valid = [p for p in inspect.signature(kind).parameters if p != "params"]
    for word in arguments:
        if word not in valid:
            raise ValueError(f"{name} has no argument {word!r}: {nearest(word, valid)}")
    if isinstance(arguments.get("betas"), list):
        arguments["betas"] = tuple(arguments["betas"])
    return kind, arguments


def _adam(
    name: str, arguments: dict[str, Any], defaults: dict[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """DeepSpeed's Adam decouples weight decay unless it is told otherwise. Its torch_adam is
    torch's class, with that one's defaults."""
    decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
    if arguments.pop("torch_adam", False):
        defaults = {}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), defaults


def _take_extra(arguments: dict[str, Any]) -> None:
    """Takes out what only DeepSpeed's classes know. Raises ValueError where it asks for more."""
    for word, (harmless, instead) in _EXTRA.items():
        if (value := arguments.pop(word, harmless[0])) not in harmless:
            raise ValueError(f"{word}={value}: {instead}")


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    found = {
        word: kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if name not in found:
        valid = {*found, "Lion"} - {"Optimizer"}
        raise ValueError(f"unknown optimizer {name!r}: {nearest(name, sorted(valid))}")
    return found[name]


# Arguments of DeepSpeed's schedules with their defaults. None: the optimizer's own rate, and of
# STEPS: there is no default.
STEPS = "total_num_steps"
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupDecayLR": {
        STEPS: None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        STEPS: None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
_SCHEDULES_WITHOUT_EQUAL = {
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR, or CyclicLR",
    "LRRangeTest": "torch.optim.lr_scheduler.LinearLR, or LambdaLR",
}


def check_schedule(name: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for a schedule or an argument that has no equal, and for an unknown one."""
    if name in _SCHEDULES_WITHOUT_EQUAL:
        raise ValueError(f"type {name}: take {_SCHEDULES_WITHOUT_EQUAL[name]}")
    if name in SCHEDULES:
        valid = list(SCHEDULES[name])
        if given.get("warmup_type", "log") not in ("log", "linear"):
            kind = given["warmup_type"]
            raise ValueError(f"unknown warmup_type {kind!r}: {nearest(kind, ['log', 'linear'])}")
    else:
        kind = vars(torch.optim.lr_scheduler).get(name)
        if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
            raise ValueError(f"unknown scheduler {name!r}: {nearest(name, SCHEDULES)}")
        valid = [p for p in inspect.signature(kind).parameters if p != "optimizer"]
    for word in given:
        if word not in valid:
            raise ValueError(f"{name} has no argument {word!r}: {nearest(word, valid)}")


def scheduler_of(
    optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]
) -> LRScheduler:
    """The schedule of this name. REQUIRES: check_schedule() took both."""
    if name in SCHEDULES:
        return Warmup(optimizer, name, arguments)
    made: LRScheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    return made


class Warmup(LRScheduler):
    """DeepSpeed's schedules that warm up: WarmupLR stays at the top rate then, WarmupDecayLR falls
    in a line to 0, WarmupCosineLR in half a cosine.

    The rate of every step is DeepSpeed's: its schedules are one step late, so the first two
    steps of a run have the smallest rate.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]
    ) -> None:
        """`name` and `arguments` as in the file. Raises ValueError for a missing one."""
        values = {**SCHEDULES[name], **arguments}
        if STEPS in values and values[STEPS] is None:
            raise ValueError(f"{name} needs {STEPS}")
        self.decay = {"WarmupLR": "none", "WarmupDecayLR": "line"}.get(name, "cosine")
        self.linear = values["warmup_type"] == "linear"
        self.warmup_steps = max(2, int(values["warmup_num_steps"]))
        self.total_steps = int(values.get(STEPS, 0))
        # Of the rate, or with a cosine of its ratio to the optimizer's own.
        self.least = float(values.get("warmup_min_lr", values.get("warmup_min_ratio", 0.0)))
        self.final = float(values.get("cos_min_ratio", 0.0))
        self.most = values.get("warmup_max_lr")
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Called by torch: the rates of the step to come, by group."""
        return [self._rate(float(base)) for base in self.base_lrs]

    def _rate(self, base: float) -> float:
        step = self.last_epoch - 1
        if self.decay == "cosine":
            if step < 0:
                return 0.0
            return base * self._cosine(step)
        most = base if self.most is None else self.most
        return self.least + (most - self.least) * self._share(step)

    def _share(self, step: int) -> float:
        """Of the way from the smallest rate to the largest."""
        if step < 0:
            return 0.0
        if step < self.warmup_steps:
            if self.linear:
                return step / self.warmup_steps
            return math.log(step + 1) / math.log(self.warmup_steps)
        if self.decay == "none":
            return 1.0
        return max(0.0, (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps))

    def _cosine(self, step: int) -> float:
        """Of the optimizer's own rate."""
        if step < self.warmup_steps:
            return self.least + (1 - self.least) * self._share(step)
        done = (step - self.warmup_steps + 1) / max(1, self.total_steps - self.warmup_steps)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * min(1.0, done))) / 2
