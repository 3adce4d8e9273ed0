"""A model and its optimizer as they were, to go back to where strata.wrap() does not succeed.

    undo = Undo(model, optimizer)
    try:
        session = Session(...)
        undo.first(session.close)      # what is to be done ahead of the rest; the last one first
        ...                            # may change parameters, modules, hooks and groups
    except BaseException:
        undo.run()
        raise

Python can raise KeyboardInterrupt between any two lines of the main thread. So nothing here asks
how far a change has come: everything is put back as it was noted. Where another interrupt comes
meanwhile, this begins once more.

Note [Memory]. The values that parameters had are kept alive until the Undo is dropped, and so are
their gradients. wrap() holds values and pages side by side in any case, when it copies the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Those of a module's attributes that torch adds to in place.
_CONTAINERS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


class Undo:
    """What wrap() may change, as it is now. Use from one thread."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """REQUIRES: strata.wrap() has nothing against the model."""
        self._first: list[Callable[[], object]] = []
        # Dictionaries that wrap() may change, and what they held.
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._groups: tuple[list[Any], list[Any]] = [], []
        for module in model.modules():
            own = vars(module)
            self._keep(*(own[name] for name in _CONTAINERS if name in own), own)
        self._parameters = list(map(_Parameter, model.parameters()))
        if isinstance(optimizer, torch.optim.Optimizer):  # else it will be refused
            self._groups = optimizer.param_groups, list(optimizer.param_groups)
            self._keep(*optimizer.param_groups, optimizer.state, optimizer.defaults)

    def _keep(self, *dicts: dict[Any, Any]) -> None:
        self._dicts += [(each, dict(each)) for each in dicts]

    def first(self, action: Callable[[], object]) -> None:
        """Adds an action that run() does ahead of those added before. It may be done twice."""
        self._first.append(action)

    def run(self) -> None:
        """Puts everything back."""
        while True:
            try:
                self._run()
                return
            except KeyboardInterrupt:
                continue

    def _run(self) -> None:
        for action in reversed(self._first):
            action()
        for container, kept in self._dicts:
            _refill(container, kept)
        for parameter in self._parameters:
            parameter.restore()
        groups, kept_groups = self._groups
        groups[:] = kept_groups


class _Parameter:
    """The class, values, gradient, attributes and hooks of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._class = type(parameter)
        self._own = dict(vars(parameter))
        self._data = parameter.data
        self._grad = parameter.grad
        self._trains = parameter.requires_grad
        self._hooks = dict(_hooks(parameter))

    def restore(self) -> None:
        parameter, data = self._parameter, self._data
        if self._class is not nn.Parameter:  # it holds other tensors, and has no memory
            self._restore_holder()
            return
        if type(parameter) is not self._class:
            parameter.__class__ = self._class  # first: operations on a paged one are not torch's
        if parameter.is_meta != data.is_meta:
            old = nn.Parameter(torch.empty_like(data), self._trains)
            torch.utils.swap_tensors(parameter, old)
        elif (parameter.dtype, parameter.device) != (data.dtype, data.device) or (
            not data.is_meta and parameter.data_ptr() != data.data_ptr()
        ):
            parameter.data = data
        if parameter.grad is not self._grad:
            parameter.grad = self._grad
        _refill(vars(parameter), self._own)
        _refill(_hooks(parameter), self._hooks)

    def _restore_holder(self) -> None:
        """Of a class that torch does not let another tensor have."""
        parameter = self._parameter
        if type(parameter) is not self._class:
            parameter.__class__ = nn.Parameter
            torch.utils.swap_tensors(parameter, nn.Parameter(self._data, self._trains))
        elif parameter.grad is not self._grad:
            parameter.grad = self._grad
        _refill(vars(parameter), self._own)


def _hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Those that run when its gradient is complete."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _refill(container: dict[Any, Any], kept: dict[Any, Any]) -> None:
    """The same entries as before; nothing happens where it has them already."""
    for key in [key for key in container if key not in kept]:
        del container[key]
    for key, value in kept.items():
        if key not in container or container[key] is not value:
            container[key] = value
