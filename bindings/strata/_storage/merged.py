"""The tensors of a model whose adapters of PEFT are merged into it: nothing is changed for them.

    for name, tensor in merged(state, dtype).items():     # as the model inside calls them
        tensor.clone()                                    # PEFT merges a copy of this layer now

A layer with adapters is copied into ordinary memory when one of its tensors is asked for, PEFT
merges the copy by its own means, whatever the kind of adapter, and the copy is forgotten. So one
layer is in memory at a time, and the tensors are those of merge_and_unload(), bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._config.managed import is_of_peft
from .._runtime.stand_in import StandIn, make
from .._runtime.wrapped import Wrapped
from ..nn.tiles import Tiled
from .conversion import Made, Outputs, Read, on_meta
from .parameters import Parameter
from .stored import StoredTensor, base_model, base_name, kept_name, stored_tensors


def merged(state: Wrapped, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Parameters of the model inside, by its names. `dtype`: which they have, and are merged in.

    Raises ValueError where PEFT cannot merge the adapters.
    """
    model = state.model
    _check_allowed(model)
    base = base_model(model)
    tensors = {t.name: make(StandIn, Parameter(state, t, dtype)) for t in stored_tensors(model)}
    layers = [_Layer(model, name, module) for name, module in _targets(model)]
    outputs = Outputs(lambda name: tensors[name].clone())
    found: dict[str, torch.Tensor] = {}
    for layer in layers:
        for name, like in layer.like(tensors).items():
            found[name] = make(StandIn, Made(outputs, layer, name, like))
    for tensor in stored_tensors(model):
        names = _outside(model, tensor, layers)
        if names:
            found[kept_name(base, names)] = tensors[tensor.name]
    return found


def _outside(model: nn.Module, tensor: StoredTensor, layers: list[_Layer]) -> list[str]:
    """The names that a tensor has in the model inside, but for what merging makes of it."""
    names = []
    for name in tensor.names:
        layer = next((one for one in layers if name.startswith(one.prefix)), None)
        if layer is None and (base := base_name(model, name)) is not None:
            names.append(base)
        if layer is not None and layer.in_place:
            return []  # what is tied to it changes with it
    return names


def _check_allowed(model: Any) -> None:
    tuner: Any = model.base_model if is_of_peft(model) else None
    if tuner is not None and not hasattr(tuner, "merge_and_unload"):
        kinds = ", ".join(sorted(str(c.peft_type.value) for c in model.peft_config.values()))
        raise ValueError(f"PEFT cannot merge adapters of {kinds}: export without merge=True")
    if hasattr(tuner, "_check_merge_allowed"):
        tuner._check_merge_allowed()


def _targets(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that merging takes out of the model, by name; of nested ones the outermost."""
    done: list[str] = []
    for name, module in model.named_modules():
        merges = "base_layer" in module._modules or _unloads(module)
        if is_of_peft(module) and merges and not any(name.startswith(f"{d}.") for d in done):
            done.append(name)
            yield name, module


def _unloads(module: nn.Module) -> bool:
    """Whether it has a way of its own to be taken out."""
    return hasattr(type(module), "unload_and_optionally_merge_module")


class _Layer:
    """A layer with adapters, and what becomes of it."""

    def __init__(self, model: nn.Module, name: str, module: nn.Module) -> None:
        self.prefix = f"{name}."
        self.in_place = not _unloads(module)
        self._module = module
        self._inside = f"{base_name(model, name)}."
        parameters = list(model.parameters())
        ours = {id(parameter) for parameter in module.parameters()}
        self._names = {
            id(parameters[tensor.parts[0]]): tensor.name
            for tensor in stored_tensors(model)
            if id(parameters[tensor.parts[0]]) in ours
        }

    def like(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What run() will give, without values."""
        return self._unload(self._copy(lambda name: on_meta(tensors[name])), merge=False)

    def run(self, read: Read) -> dict[str, torch.Tensor]:
        """The tensors of the merged layer, as the model inside calls them."""
        try:
            return self._unload(self._copy(read), merge=True)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(
                f"PEFT cannot merge the adapters of {self.prefix[:-1]!r}: {error}"
            ) from error

    def _copy(self, read: Read) -> Any:
        """A plain copy of the layer, with these values."""
        memo: dict[int, Any] = {}
        for tiled in self._module.modules():
            if isinstance(tiled, Tiled):
                memo[id(tiled)] = plain = tiled.plain()
                for leaf in tiled.tensor_names():
                    value = read(self._names[id(tiled.parts(leaf)[0])])
                    plain._parameters[leaf] = nn.Parameter(value)
        for parameter in self._module.parameters():
            if id(parameter) in self._names:
                memo[id(parameter)] = nn.Parameter(read(self._names[id(parameter)]))
        return copy.deepcopy(self._module, memo)

    def _unload(self, layer: Any, merge: bool) -> dict[str, torch.Tensor]:
        """As PEFT does it to all layers of a model."""
        if self.in_place:
            if merge:
                layer.merge(safe_merge=False, adapter_names=None)
            layer = layer.get_base_layer()
        else:
            layer = layer.unload_and_optionally_merge_module(
                merge=merge, safe_merge=False, adapter_names=None
            )
        return {f"{self._inside}{name}": value for name, value in layer.state_dict().items()}
