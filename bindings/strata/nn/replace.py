"""Puts tiled layers in the place of plain ones within a model, and takes them out again.

strata.nn.tile(model, "lm_head", 8)
undo = put_tiles(model, {"lm_head": 8}, optimizer)       # what strata.wrap() does
remove_tiles(model, optimizer)
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from .._errors import nearest
from .tiles import Tiled, TiledEmbedding, TiledLinear, cut_parameters, why_not


def tile(
    model: nn.Module, name: str, tiles: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Replaces a linear layer or an embedding of a model by one that is cut into tiles of rows.

    Every module with the same weight is cut alike, so tied weights stay tied. Call it before
    strata.wrap(), which does so by itself where a layer is too large for the device.

    Args:
        model: the model that has it.
        name: of the layer, such as "lm_head".
        tiles: how many, from 1 to the rows of its weight.
        optimizer: where it is built already: it gets the tiles for the parameters that they take
            the place of.

    Raises:
        ValueError: there is no such module (with the nearest name), it or one tied to it cannot be
            cut, or the model is wrapped.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 1000))
        >>> strata.nn.tile(model, "1", 4)
        >>> sorted(model.state_dict())
        ['0.weight', '1.bias', '1.weight']
    """
    if model.__dict__.get("_strata") is not None:
        raise ValueError("this model is wrapped: call strata.nn.tile() before strata.wrap()")
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"the model has no module {name!r}: {nearest(name, modules)}")
    if isinstance(modules[name], Tiled):
        raise ValueError(f"{name!r} is cut into tiles already")
    for tiled in put_tiles(model, {name: tiles}, optimizer):
        tiled.original = ()  # for good: there is no way back


def put_tiles(
    model: nn.Module, counts: Mapping[str, int], optimizer: torch.optim.Optimizer | None = None
) -> list[Tiled]:
    """Cuts modules, by name, and all that are tied to them. Returns what took their places.

    Raises ValueError, and leaves the model alone, where one cannot be cut.
    """
    modules = dict(model.named_modules())
    together = _tied_to(modules, counts)
    for name in together:
        if reason := why_not(modules[name]):
            tied = "" if name in counts else f", tied to {', '.join(map(repr, counts))}"
            raise ValueError(f"{name!r}{tied}: {reason}")
    # 1. Each parameter is cut once, however many modules have it.
    cut: dict[int, list[nn.Parameter]] = {}
    for name, count in together.items():
        parts = cut_parameters(modules[name], count)
        for leaf, parameter in modules[name].named_parameters():
            cut.setdefault(id(parameter), parts[leaf])
    # 2. Replace.
    made: list[Tiled] = []
    for name in together:
        module = modules[name]
        mine = {leaf: cut[id(p)] for leaf, p in module.named_parameters()}
        if isinstance(module, nn.Linear):
            made.append(TiledLinear.of_parts(module, mine))
        else:
            made.append(TiledEmbedding.of_parts(cast(nn.Embedding, module), mine))
        made[-1].original = (module,)
        _put(model, name, made[-1])
    _exchange(optimizer, cut)
    return made


def _tied_to(modules: Mapping[str, nn.Module], counts: Mapping[str, int]) -> dict[str, int]:
    """The modules asked for and all that share parameters with them: into how many tiles each."""
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    together = dict(counts)
    waiting = list(counts)
    while waiting:
        name = waiting.pop()
        for parameter in modules[name].parameters():
            for other in owners[id(parameter)]:
                if together.get(other, 0) < together[name]:
                    together[other] = together[name]
                    waiting.append(other)
    return together


def release_originals(model: nn.Module) -> None:
    """Gives back the memory of what tiles stand in for. REQUIRES: the tiles have memory of their
    own."""
    for module in model.modules():
        if isinstance(module, Tiled) and module.original:
            for parameter in module.original[0].parameters():
                if not parameter.is_meta:
                    parameter.data = parameter.new_empty(0)


def remove_tiles(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Undoes put_tiles(): the original modules come back, with the values that the tiles have."""
    whole: dict[int, nn.Parameter] = {}
    replaced: dict[int, list[nn.Parameter]] = {}
    originals: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, Tiled) or not module.original:
            continue
        original = module.original[0].train(module.training)
        originals.append((name, original))
        for leaf, parameter in original.named_parameters():
            parts = module.parts(leaf)
            if id(parameter) not in whole:
                whole[id(parameter)] = parameter
                _refill(parameter, parts)
            for part in parts:
                replaced[id(part)] = [parameter] if part is parts[0] else []
    # Modules go last: where this ends half-way, doing it again finds all that is left to do.
    _exchange(optimizer, replaced)
    for name, original in originals:
        _put(model, name, original)


def _refill(parameter: nn.Parameter, parts: list[nn.Parameter]) -> None:
    """Joins the tiles' values, unless the parameter still shares its memory with them."""
    parameter.requires_grad_(parts[0].requires_grad)
    if parameter.is_meta and not parts[0].is_meta:
        real = nn.Parameter(torch.cat([p.detach() for p in parts]), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)
    elif not parameter.numel():
        parameter.data = torch.cat([p.detach() for p in parts])


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Everywhere where the module of that name is: one module may have several places."""
    old = model.get_submodule(name)
    for parent in model.modules():
        for leaf, child in parent._modules.items():
            if child is old:
                parent._modules[leaf] = module


def _exchange(optimizer: Any, replacement: Mapping[int, list[nn.Parameter]]) -> None:
    """Puts other parameters into the optimizer's groups, in the places of those they stand for."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for group in optimizer.param_groups:
        group["params"] = [q for p in group["params"] for q in replacement.get(id(p), [p])]
