"""Which options of a parameter group strata can follow: when it is wrapped, and with every step.

check_class(optimizer)                       # ahead of wrap()
check_options("AdamW", group)                # the user may change them at any time
"""

from __future__ import annotations

from typing import Any

import torch

# They change the arithmetic in ways that the kernels do not know.
UNSUPPORTED = ("amsgrad", "differentiable")
# Ways to compute the same.
HARMLESS = {"foreach", "fused", "capturable"}
FOLLOWED = {
    *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize", "momentum"),
    *("dampening", "nesterov", "lr_decay", "initial_accumulator_value"),
}


class Numbers:
    """The options of group `number` that are numbers. Raises ValueError, naming both."""

    def __init__(self, number: int, group: dict[str, Any]) -> None:
        self._number = number
        self._group = group

    def __call__(self, option: str) -> float:
        """0 where the class has none."""
        return self._as_float(option, self._group.get(option, 0.0))

    def needed(self, option: str) -> float:
        """One that every class has."""
        if option not in self._group:
            raise ValueError(f"parameter group {self._number} has no {option!r}")
        return self(option)

    def pair(self, option: str) -> tuple[float, float]:
        """Zeros where the class has none."""
        value = self._group.get(option, (0.0, 0.0))
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError(
                f"parameter group {self._number} has {option}={value!r}, which must be two numbers"
            )
        return self._as_float(option, value[0]), self._as_float(option, value[1])

    def _as_float(self, option: str, value: Any) -> float:
        try:
            if not isinstance(value, str):
                return float(value)
        except (TypeError, ValueError, RuntimeError):  # of None, lists and tensors of several
            pass
        except OverflowError as error:  # of whole numbers; hundreds of digits would be shown
            raise ValueError(
                f"parameter group {self._number} has {option} larger than any float"
            ) from error
        raise ValueError(
            f"parameter group {self._number} has {option}={value!r}, which is not a number"
        )


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where a class that has a kernel has an option, in use, that it lacks."""
    known = FOLLOWED | HARMLESS | set(UNSUPPORTED)
    for option, value in optimizer.defaults.items():
        if option not in known and value:
            _refuse(type(optimizer).__name__, option, value)


def check_options(name: str, group: dict[str, Any]) -> None:
    """Raises ValueError where the group of an optimizer of this class asks for what is not done."""
    for option in UNSUPPORTED:
        if group.get(option):
            _refuse(name, option, group[option])


def _refuse(name: str, option: str, value: Any) -> None:
    raise ValueError(
        f"{name}({option}={value}) is not supported: build the optimizer without {option}"
    )
