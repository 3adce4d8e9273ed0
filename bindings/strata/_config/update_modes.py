"""When parameters are updated, and as what their moments are stored: the words of strata.wrap() for
it, and what does not go with what.

    core_mode(LockFree(max_staleness=1))       # ("lock_free", 1), as the core's Config names it
    parse_update("lock-free:1")                # LockFree(max_staleness=1), from a command line
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .._errors import check_choice, nearest
from .choices import count

if TYPE_CHECKING:
    import torch

    from .._core import Config
    from .options import Options

EXACT = ("on_step", "in_backward")
LOCK_FREE_WORD = "lock-free"  # of LockFree on a command line
STALENESS_MAX = 1 << 16  # of the core, which counts forwards by it
UPDATE_KINDS = "'on_step', 'in_backward' or strata.LockFree(max_staleness=1)"
# What strata.wrap() takes, as str() writes it: nothing here needs torch. And the core's name of it.
STATE_DTYPES: dict[str, Literal["float32", "bfloat16", "block8"]] = {
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "8bit": "block8",
}


@dataclass(frozen=True)
class LockFree:
    """Updates that computation does not wait for: a value of `update=` for strata.wrap().

    Gradients whose update lags add up and are applied together, with the options of the newest.

    Args:
        max_staleness: by how many steps the parameters may lag that a forward sees, from 0 to
            65,536. It waits only where they would be older. With 0 every forward waits for its
            updates, and the result is bit for bit that of update="on_step".

    Raises:
        TypeError: `max_staleness` is no whole number.
        ValueError: it is out of range.

    Example:
        >>> strata.LockFree(max_staleness=2)
        LockFree(max_staleness=2)
        >>> model = torch.nn.Linear(64, 64)
        >>> model, optimizer = strata.wrap(
        ...     model, torch.optim.AdamW(model.parameters()), update=strata.LockFree(1)
        ... )
    """

    max_staleness: int = 1

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what is no number of steps."""
        steps = self.max_staleness
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise TypeError(f"max_staleness must be a whole number of steps, not {steps!r}")
        if steps < 0:
            raise ValueError(f"max_staleness must be 0 steps or more, not {steps}")
        if steps > STALENESS_MAX:
            raise ValueError(f"max_staleness must be {STALENESS_MAX} steps at most, not {steps}")


Update = str | LockFree


def core_mode(update: Update) -> tuple[Literal["on_step", "in_backward", "lock_free"], int]:
    """The mode as the core names it, and the staleness that it allows."""
    if isinstance(update, LockFree):
        return "lock_free", update.max_staleness
    return ("in_backward" if update == "in_backward" else "on_step"), 0


def parse_update(text: str) -> Update:
    """From "on_step", "in_backward", "lock-free" or "lock-free:2". Raises ValueError."""
    word, colon, steps = text.partition(":")
    if word == LOCK_FREE_WORD:
        if colon and not steps.isdecimal():
            raise ValueError(
                f"{text!r}: behind the colon goes a number of steps, as in 'lock-free:1'"
            )
        return LockFree(count(steps)) if colon else LockFree()
    check_choice("update", text, (*EXACT, LOCK_FREE_WORD))
    return text


def check_update(options: Options) -> None:
    """Raises ValueError for an unknown mode, and for what it cannot be combined with."""
    update = options.update
    if options.max_grad_norm is not None and options.max_unit_norm is not None:
        raise ValueError(
            "max_grad_norm clips the norm of all gradients together, max_unit_norm that of every "
            "unit by itself: pass one of them"
        )
    if isinstance(update, LockFree):
        _check_lock_free(update, options)
        return
    if update.lower().replace("-", "").replace("_", "") == "lockfree":
        raise ValueError(
            f"unknown update {update!r}: did you mean strata.LockFree(max_staleness=1)?"
        )
    check_choice("update", update, EXACT)
    if update == "in_backward":
        _check_in_backward(options)


def _check_in_backward(options: Options) -> None:
    begun = "update='in_backward' begins updates while backward runs, before "
    if options.max_grad_norm is not None:
        raise ValueError(
            f"{begun}the norm of all gradients is known, which max_grad_norm needs: pass "
            "max_unit_norm=..., which clips every unit by itself, or update='on_step'"
        )
    if options.gradient_accumulation_steps > 1:
        raise ValueError(
            f"{begun}the gradients of {options.gradient_accumulation_steps} backward() calls could "
            "add up: pass update='on_step' with gradient_accumulation_steps, or larger batches, "
            "which split= slices"
        )
    if options.skip_nonfinite:
        raise ValueError(
            f"{begun}it is known whether all gradients are finite, which skip_nonfinite needs: "
            "pass update='on_step'"
        )


def _check_lock_free(update: LockFree, options: Options) -> None:
    if options.skip_nonfinite and update.max_staleness > 0:
        raise ValueError(
            f"{update} adds up gradients of several steps, so skip_nonfinite cannot leave out one "
            "of them: pass LockFree(max_staleness=0) or update='on_step'"
        )


def check_loss_scale(config: Config) -> None:
    """Raises RuntimeError where steps of dynamic loss scaling cannot be told apart or skipped."""
    if config["update"] == "in_backward":
        raise RuntimeError(
            "GradScaler needs to know whether all gradients are finite before any is applied, and "
            "update='in_backward' has applied them already, scaled as they were: load the "
            "parameters again, and wrap with update='on_step'"
        )
    if config["max_staleness"] > 0:
        raise RuntimeError(
            f"GradScaler divides every step's gradients by that step's scale, and "
            f"LockFree(max_staleness={config['max_staleness']}) adds up gradients of several "
            "steps: wrap with LockFree(max_staleness=0) or update='on_step'"
        )


def check_state_dtype(dtype: torch.dtype | str) -> None:
    """Raises ValueError for what no moment can be stored as."""
    word = isinstance(dtype, str)
    if str(dtype) not in STATE_DTYPES or word != (dtype == "8bit"):
        raise ValueError(f"unknown state_dtype {str(dtype)!r}: {nearest(str(dtype), STATE_DTYPES)}")


def check_moments(dtype: torch.dtype | str, counts: Iterable[int]) -> None:
    """Raises ValueError for a lossy `dtype` where no parameter group keeps a moment to store."""
    if str(dtype) != "torch.float32" and not any(counts):
        raise ValueError(
            f"state_dtype={dtype!r} says how moments are stored, and this optimizer keeps none "
            "(SGD without momentum): leave state_dtype out"
        )
