"""Gradients that are tensors of PyTorch's, because somebody else has them or a view of them.

    held = HeldGradients(replace)            # replace(index, values): the core takes them
    held.give(index, tensor)                 # by the user, who may have the tensor itself
    held.share(index, values, changed)       # read for somebody who kept a view
    if index in held: held.tensor(index).add_(grad)
    held.land_all()                          # ahead of a step

Each is held for as long as somebody else has it. Whether one has is looked up when another comes to
be held, and at the end of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._torch_compat import use_count
from .ownership import is_shared

UNKNOWN = -1
KEPT_MIN = 8  # more of them are looked through when they have become twice as many


@dataclass(slots=True, eq=False)
class _Held:
    tensor: torch.Tensor
    version: int  # of the tensor when the core had the same; UNKNOWN: it has not
    given: bool  # the core never had it, and the user may have the tensor itself
    old: int = UNKNOWN  # the tensor's version when a step had used it, or it became zero


class HeldGradients:
    """By parameter, the newest last."""

    def __init__(self, replace: Callable[[int, torch.Tensor], None]) -> None:
        self._replace = replace
        self._held: dict[int, _Held] = {}
        self._look_at = KEPT_MIN

    def __contains__(self, index: int) -> bool:
        return index in self._held

    def __len__(self) -> int:
        return len(self._held)

    def indices(self) -> set[int]:
        """Of the parameters whose gradients are held."""
        return set(self._held)

    def tensor(self, index: int) -> torch.Tensor:
        """The gradient. REQUIRES: it is held."""
        return self._held[index].tensor

    def given(self, index: int) -> torch.Tensor | None:
        """The tensor that the user gave, if that is the gradient."""
        held = self._held.get(index)
        return held.tensor if held is not None and held.given else None

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """The user makes it the gradient, in the place of any other."""
        self.drop(index)
        self._add(index, _Held(tensor, UNKNOWN, given=True))

    def share(self, index: int, values: torch.Tensor, changed: bool) -> None:
        """Somebody has a view of these values, which the core has too unless they were changed."""
        version = UNKNOWN if changed else values._version
        self._add(index, _Held(values, version, given=False))

    def drop(self, index: int) -> None:
        """It is no gradient any more."""
        self._held.pop(index, None)

    def clear(self) -> None:
        """None is."""
        self._held.clear()

    def land_all(self) -> None:
        """The core gets what it has not."""
        for index in self.indices():
            self._land(index)

    def end_step(self) -> None:
        """A step has used what the core had."""
        for index in self.indices():
            held = self._held[index]
            held.version, held.old = UNKNOWN, _version_of(held.tensor)
            if not _is_needed(held):
                self.drop(index)

    def zero(self, index: int) -> None:
        """Makes it zero. REQUIRES: it is held."""
        held = self._held[index]
        held.tensor.detach().zero_()
        held.old = _version_of(held.tensor)

    def any_new(self) -> bool:
        """Whether any is neither zero nor as the last step has used it."""
        return any(held.old != _version_of(held.tensor) for held in self._held.values())

    def _add(self, index: int, held: _Held) -> None:
        # Most are given up soon: one may go as the next one comes.
        for other in list(self._held)[-2:]:
            self._give_up(other)
        self._held[index] = held
        if len(self) > self._look_at:
            for other in list(self._held):
                self._give_up(other)
            self._look_at = max(KEPT_MIN, 2 * len(self))

    def _give_up(self, index: int) -> None:
        """Takes a gradient back into the core if nobody else has its tensor any more."""
        if not _is_needed(self._held[index]):
            self._land(index)
            self.drop(index)

    def _land(self, index: int) -> None:
        held = self._held[index]
        if held.given or held.version != held.tensor._version:
            self._replace(index, held.tensor)
            held.version = UNKNOWN if held.given else held.tensor._version


def _version_of(tensor: torch.Tensor) -> int:
    """Those of the user's inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _references(held: _Held) -> int:
    return sys.getrefcount(held.tensor)


_REFERENCES = _references(_Held(torch.empty(1), UNKNOWN, given=True))


def _is_needed(held: _Held) -> bool:
    """Whether anybody else has the tensor that was given, or one that shares its memory."""
    if held.given and (_references(held) > _REFERENCES or use_count(held.tensor) > 1):
        return True
    return is_shared(held.tensor)
