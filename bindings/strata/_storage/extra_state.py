"""What modules keep beside parameters and buffers: torch's get_extra_state().

places = extra_places(model)                          # modules, by torch's names of their state
manifest["extra_state"] = take_extra_state(places)
values = saved_extra_state(manifest, model, where)    # before a load: it fits, and is whole
set_extra_state(model, values)                        # after it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .checkpoint_files import CheckpointError
from .saved_values import from_text, to_text

SUFFIX = "_extra_state"  # torch's


def is_extra_state(name: str) -> bool:
    """Whether a name of a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == SUFFIX


def extra_places(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have an extra state, by its name in a state dict."""
    return {
        f"{prefix}.{SUFFIX}" if prefix else SUFFIX: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def take_extra_state(places: Mapping[str, nn.Module]) -> dict[str, str]:
    """Of each module, as it is now. Raises TypeError for what cannot be kept, with its name."""
    return {name: to_text(module.get_extra_state(), name) for name, module in places.items()}


def saved_extra_state(manifest: dict[str, Any], model: nn.Module, where: str) -> dict[str, Any]:
    """What a manifest has. Raises CheckpointError where it is damaged, or no module takes it."""
    found: dict[str, Any] = {}
    for name, text in manifest["extra_state"].items():
        try:
            found[name] = from_text(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: of {name!r}, {error}") from error
    if problem := misplaced(model, found):
        raise CheckpointError(f"{where} is of another model: {problem}")
    return found


def misplaced(model: nn.Module, values: Mapping[str, Any]) -> str:
    """The first name that no module takes a state under; "": there is none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in values:
        module = modules.get(name.removesuffix(SUFFIX).removesuffix("."))
        if module is None:
            return f"there is no module for {name!r}"
        if type(module).set_extra_state is nn.Module.set_extra_state:
            return f"{name!r} is for a module without set_extra_state()"
    return ""


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Gives it to the modules. REQUIRES: it is not misplaced()."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in values.items():
        modules[name.removesuffix(SUFFIX).removesuffix(".")].set_extra_state(value)
