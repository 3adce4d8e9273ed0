"""Hooks that belong to one model: in a copy or a pickle of it nothing of strata is left."""

from typing import Any


def inert(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the model: nothing."""


class Uncopied:
    """A hook that turns inert when the model is copied or pickled."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Nothing of strata is left in a copy."""
        return inert

    def __reduce__(self) -> Any:
        """Nothing of strata is left in a pickle."""
        return (_make_inert, ())


def _make_inert() -> Any:
    return inert
