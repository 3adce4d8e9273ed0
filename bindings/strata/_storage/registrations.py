"""Whether anything was registered with modules of a model: what is known of it need not be looked
up again where nothing was.

    registrations.watch(model)
    if known != registrations.count: ...look again...

torch tells of every parameter, buffer and module that any module gets, by hooks that are there for
all of them. What is taken away from one is not told.
"""

import weakref
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks


class Registrations:
    """How many there were."""

    def __init__(self) -> None:
        """Nothing is watched."""
        self.count = 0
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        hooks.register_module_buffer_registration_hook(self._count)
        hooks.register_module_module_registration_hook(self._count)
        hooks.register_module_parameter_registration_hook(self._count)

    def watch(self, model: nn.Module) -> None:
        """Counts what the model's modules get from here on."""
        self._watched.update(model.modules())

    def _count(self, module: nn.Module, name: str, value: Any) -> None:
        """Called by torch ahead of each."""
        self.count += module in self._watched


registrations = Registrations()


def persistent_places(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Where a saved model has its buffers: a name, the module, and the name there."""
    places = []
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None and key not in module._non_persistent_buffers_set:
                places.append((f"{prefix}.{key}" if prefix else key, module, key))
    return places
