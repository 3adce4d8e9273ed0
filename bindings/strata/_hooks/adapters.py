"""Adapters that come too late: PEFT adds modules to a model whose pages are laid out.

    handle = refuse_new_adapters(model)        # None: the model has no adapters
    model.load_adapter("other/", "second")     # RuntimeError; PEFT undoes what it had begun
    handle.remove()

An adapter that was there when the model was wrapped may be filled at any time. PEFT need not be
installed: its classes are known by the name of their package.
"""

from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .._config.managed import is_of_peft


def refuse_new_adapters(model: nn.Module) -> Any:
    """From now on PEFT can add no adapter to the model. Returns a handle with remove()."""
    layers = [module for module in model.modules() if is_of_peft(module)]
    if not layers:
        return None
    inside = WeakSet(model.modules())
    holders = WeakSet([m for layer in layers for m in (layer, *layer.children())])

    def refuse(module: nn.Module, name: str, added: nn.Module | None) -> None:
        if module not in inside or not (module in holders or is_of_peft(added)):
            return
        new = [p for p in added.parameters() if not hasattr(p, "_strata")] if added else []
        if new:
            raise RuntimeError(
                f"adapter module {name!r} cannot be added to a wrapped model, which has no pages "
                "for it: add it ahead of strata.wrap(), or call strata.unwrap(model) first. An "
                "adapter that was there can be filled: model.load_adapter(path, its_name)"
            )

    return register_module_module_registration_hook(refuse)
