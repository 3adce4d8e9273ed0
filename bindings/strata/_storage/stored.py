"""The tensors that files know of a model: its parameters, with tiles joined to the layer's own.

    for tensor in stored_tensors(model):
        tensor.name, tensor.shape, tensor.parts      # "lm_head.weight", (32000, 64), (7, 8, 9, 10)

A layer that is cut into tiles (nn/tiles.py) has many parameters, but files hold one tensor, as
those of the plain model do: a checkpoint may be loaded under budgets that ask for other tiles. Pure
functions.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from .._config.managed import WRAPPED_BY_PEFT, is_of_peft
from ..nn.tiles import Tiled
from .registrations import persistent_places

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. Its rows are those of its parts, one behind the other."""

    names: tuple[str, ...]  # of a tied parameter more than one; the first is the file's
    shape: Shape
    parts: tuple[int, ...]  # places in model.parameters()
    part_names: tuple[str, ...]  # as in model.named_parameters()
    part_shapes: tuple[Shape, ...]

    @property
    def name(self) -> str:
        """The tensor's name in a file."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def part_numels(self) -> list[int]:
        """Elements of each part."""
        return [math.prod(shape) for shape in self.part_shapes]

    def split(self, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters' names, and the part of `value` that each one is."""
        parts = value.reshape(-1).split(self.part_numels)
        for name, part, shape in zip(self.part_names, parts, self.part_shapes, strict=True):
            yield name, part.reshape(shape)


def stored_tensors(model: nn.Module) -> list[StoredTensor]:
    """In the order of model.parameters(), where a tensor stands in the place of its first part."""
    joined = _joined_names(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(joined.get(name, name))
    members: dict[str, list[tuple[int, str, nn.Parameter]]] = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        members.setdefault(joined.get(name, name), []).append((place, name, parameter))
    result = []
    for found in members.values():
        places, part_names, parts = zip(*found, strict=True)
        shapes = tuple(tuple(p.shape) for p in parts)
        whole = shapes[0] if len(parts) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        result.append(StoredTensor(tuple(names[id(parts[0])]), whole, places, part_names, shapes))
    return result


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a saved model: those that `state_dict` would hold."""
    result: dict[str, torch.Tensor] = {}
    for name, module, key in persistent_places(model):
        value = module._buffers[key]
        assert value is not None
        result[name] = value
    return result


def base_model(model: nn.Module) -> nn.Module:
    """The model that PEFT has put adapters into; the model itself, where it has not."""
    inside = getattr(model, "get_base_model", None)
    return cast(nn.Module, inside()) if is_of_peft(model) and inside is not None else model


def base_name(model: nn.Module, name: str) -> str | None:
    """What a parameter or buffer of `model` is called in the model that PEFT has put adapters into;
    None: it is an adapter's. The copy that PEFT trains of a module has the name of the original."""
    module: nn.Module | None = model
    parts = name.split(".")
    found: list[str] = []
    copied = False
    for part in parts[:-1]:
        ours = module is not None and is_of_peft(module)
        if copied:  # this is the adapter's name
            copied = False
        elif not ours:
            found.append(part)
        elif part == "modules_to_save":
            copied = True
        elif part not in WRAPPED_BY_PEFT:
            return None
        module = module._modules.get(part) if module is not None else None
    adapter = module is not None and is_of_peft(module)
    return None if adapter else ".".join([*found, parts[-1]])


def kept_name(model: nn.Module, names: Sequence[str]) -> str:
    """Of the names of a tied parameter, the one that files have. REQUIRES: there is one."""
    tied = [re.compile(p) for p in getattr(model, "all_tied_weights_keys", None) or ()]
    kept = (name for name in names if not any(pattern.search(name) for pattern in tied))
    return next(kept, names[0])


def tiled_modules(model: nn.Module) -> dict[str, Tiled]:
    """The layers of a model that are cut into tiles, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Tiled)}


def _joined_names(model: nn.Module) -> dict[str, str]:
    """The name of every tile's parameter → that of the tensor which it is a part of."""
    result: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Tiled):
            prefix = f"{path}." if path else ""
            for name in module.tensor_names():
                for i in range(len(module.tiles)):
                    result[f"{prefix}tiles.{i}.{name}"] = f"{prefix}{name}"
    return result
