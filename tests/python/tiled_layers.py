"""What tests of strata.nn share: a layer with and without tiles, and its gradients."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from strata.nn import TiledEmbedding, TiledLinear
from torch import nn


def joined(layer: nn.Module, what: Callable[[nn.Parameter], Any]) -> dict[str, torch.Tensor]:
    """`what` of every parameter, by the names that the layer has before it is cut."""
    if not isinstance(layer, TiledLinear | TiledEmbedding):
        return {name: what(p) for name, p in layer.named_parameters()}
    return {name: torch.cat([what(p) for p in layer.parts(name)]) for name in layer.tensor_names()}


def gradients(loss: torch.Tensor, layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x.grad = None
    loss.backward()
    found = joined(layer, lambda p: p.grad)
    return found if x.grad is None else found | {"x": x.grad}


def heads(linear: nn.Linear) -> Iterator[nn.Module]:
    yield copy.deepcopy(linear)
    for tiles in (1, 3):
        yield TiledLinear.from_linear(copy.deepcopy(linear), tiles)
