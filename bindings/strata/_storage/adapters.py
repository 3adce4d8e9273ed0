"""First values of adapters that PEFT has put into a model on the meta device.

    layers = AdapterLayers(model, write, seed)
    layers.put(tensor, value)          # every value of the model inside, as it comes
    layers.finish()                    # adapters outside of all layers

PEFT initialises an adapter when it puts it beside a layer, which then has values. On the meta
device there are none, and what PEFT drew is lost. So, as soon as a layer has its values, PEFT puts
the same adapters beside a copy of that one layer, in a model that has nothing else: whatever the
kind of adapter and of its initialisation, what it makes of the layer is taken over, the layer's own
values too where it changes them (PiSSA). Random values depend on the seed and the layer's name
alone. Adapters that have values keep them.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._config.managed import is_of_peft
from .._runtime.coded import Whole
from .._runtime.ready_codes import ReadyCodes
from . import initialise
from .stored import StoredTensor, base_model, base_name, stored_tensors

Value = torch.Tensor | ReadyCodes
Write = Callable[..., None]
"""Takes a parameter's name and value; of a tile also the Whole that it is a tile of."""


class AdapterLayers:
    """Layers with adapters, between where values come from and where they are written."""

    def __init__(self, model: nn.Module, write: Write, seed: int) -> None:
        self._model = model
        self._write = write
        self._seed = seed
        self._left: dict[str, StoredTensor] = {}  # adapters without values
        for tensor in stored_tensors(model):
            if all(base_name(model, name) is None for name in tensor.names):
                self._left[tensor.name] = tensor
        self._layers = dict(_layers(model)) if self._left else {}
        self._values: dict[str, dict[str, Value]] = {}  # of layers that lack some yet
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(model)}

    def put(self, tensor: StoredTensor, value: Value) -> None:
        """A value of the model inside."""
        layer = next((name for name in self._layers if tensor.name.startswith(f"{name}.")), None)
        if layer is None:
            self._write_parts(tensor, value)
            return
        values = self._values.setdefault(layer, {})
        values[tensor.name] = value
        if all(name in values for name in self._own_names(layer)):
            self._fill(layer, self._values.pop(layer))

    def finish(self) -> None:
        """Writes the adapters that are left. REQUIRES: put() has been given all there is."""
        for name in list(self._left):
            parameter = self._model.get_parameter(name)
            if not parameter.is_meta:
                self._write_parts(self._left.pop(name), parameter.detach())
        for module in dict.fromkeys(name.rpartition(".")[0] for name in self._left):
            for leaf, value in initialise.parameters(self._model, module, self._seed).items():
                if (tensor := self._left.pop(f"{module}.{leaf}", None)) is not None:
                    self._write_parts(tensor, value)

    def _own_names(self, layer: str) -> list[str]:
        """The tensors of a layer that the model had before PEFT came, as the model has them now."""
        prefix = f"{layer}."
        return [n for n in self._tensors if n.startswith(prefix) and n not in self._left]

    def _fill(self, layer: str, values: dict[str, Value]) -> None:
        """Writes a layer, and what PEFT puts beside it. ValueError where that changes codes."""
        wanted = [
            n
            for n in self._left
            if n.startswith(f"{layer}.") and self._model.get_parameter(n).is_meta
        ]
        plain = {name: dense(value) for name, value in values.items()} if wanted else {}
        made = self._injected(layer, plain) if wanted else None
        for name, value in values.items():
            if made is not None:
                changed = made.get_parameter(name.removeprefix(f"{layer}.")).detach()
                if not torch.equal(changed, plain[name].to(changed.dtype)):
                    if isinstance(value, ReadyCodes):
                        raise ValueError(
                            f"the adapter of {layer!r} begins by changing its weight, which is "
                            "quantised in the files: initialise the adapter otherwise"
                        )
                    value = changed
            self._write_parts(self._tensors[name], value)
        for name in wanted:
            found = _parameter(made, name.removeprefix(f"{layer}."))
            tensor = self._left.pop(name)
            if found is None or tuple(found.shape) != tensor.shape:
                raise ValueError(
                    f"PEFT makes no first values for parameter {name!r} of its layer alone: build "
                    "the base model on the CPU"
                )
            self._write_parts(tensor, found)

    def _injected(self, layer: str, values: dict[str, torch.Tensor]) -> nn.Module:
        """What PEFT makes of a layer with these values, in a model that has nothing else."""
        peft: Any = sys.modules["peft"]
        inside: Any = self._layers[layer]
        while is_of_peft(inside):
            inside = inside.base_layer
        memo: dict[int, Any] = {}
        for name, value in values.items():
            meta = self._model.get_parameter(name)
            memo[id(meta)] = nn.Parameter(value.to(meta.dtype), meta.requires_grad)
        root = nn.Module()
        base = base_model(self._model)
        if hasattr(base, "config"):
            root.config = base.config
        path = base_name(self._model, layer) or layer
        *parents, leaf = path.split(".")
        parent = root
        for part in parents:
            child = nn.Module()
            parent.add_module(part, child)
            parent = child
        parent.add_module(leaf, copy.deepcopy(inside, memo))
        configs: dict[str, Any] = self._model.peft_config  # type: ignore[assignment]

        def inject() -> None:
            for name, config in configs.items():
                config = copy.deepcopy(config)
                for other in ("modules_to_save", "trainable_token_indices"):
                    if getattr(config, other, None):
                        setattr(config, other, None)
                try:
                    peft.inject_adapter_in_model(config, root, name)
                except Exception as error:
                    raise ValueError(
                        f"PEFT cannot make first values for the adapter {name!r} of {layer!r}: "
                        f"{error}; build the base model on the CPU"
                    ) from error

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the whole model were given before
            initialise.seeded(self._seed, layer, [inject])
        return root.get_submodule(path)

    def _write_parts(self, tensor: StoredTensor, value: Value) -> None:
        """Writes a tensor as the parameters that it is made of."""
        if isinstance(value, ReadyCodes):
            parts = value.split(tensor.part_shapes)
            for name, codes in zip(tensor.part_names, parts, strict=True):
                self._write(name, codes)
            return
        value = value.detach().to(torch.float32).contiguous()
        whole = [Whole([value])] if len(tensor.parts) > 1 else []
        for name, part in tensor.split(value):
            self._write(name, part, *whole)


def dense(value: Value) -> torch.Tensor:
    """The values; of codes what they stand for."""
    return value.dense() if isinstance(value, ReadyCodes) else value


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that adapters stand beside, by name; of nested ones the outermost."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not is_of_peft(module) or "base_layer" not in module._modules:
            continue
        if not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def _parameter(layer: nn.Module | None, name: str) -> torch.Tensor | None:
    try:
        return layer.get_parameter(name).detach() if layer is not None else None
    except AttributeError:
        return None
