"""Which frozen parameters rest as codes, and as which: what the keyword `frozen` of wrap() means.

    check_frozen("nf4")
    forms = stored_forms(model, is_trained, "nf4")       # {"layers.0.weight": "nf4", ...}

Pure but for looking at the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._errors import check_choice
from .choices import AS_IS, FORMS

if TYPE_CHECKING:
    from .._core import StoredName

BLOCK = 64  # elements that share a scale: engine/../codes/form.hpp

Frozen = str | Callable[[str, nn.Module], str | None]
"""A form for all weights of layers, or what gives one for a module by its name, or None."""


def check_frozen(frozen: Frozen) -> None:
    """Raises ValueError for what is no form, and no function."""
    if not callable(frozen):
        check_choice("frozen", frozen, (AS_IS, *FORMS))


def stored_forms(
    model: nn.Module, is_trained: Callable[[nn.Parameter], bool], frozen: Frozen
) -> dict[str, StoredName]:
    """By name of the parameter. A form that is given for all leaves out biases, norms and
    embeddings, also where these are the last layer. Raises ValueError for a parameter that cannot
    be stored so, with what to do."""
    if frozen == AS_IS:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forms: dict[str, StoredName] = {}
    kept = set() if callable(frozen) else {id(p) for p in _embeddings(model)}
    for path, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        form = frozen(path, module) if callable(frozen) else frozen
        if form is None or form == AS_IS or not weights:
            continue
        check_choice("frozen", form, (AS_IS, *FORMS))
        for weight in weights:
            name = names[id(weight)]
            if id(weight) in kept or (is_trained(weight) and not callable(frozen)):
                continue
            if is_trained(weight):
                raise ValueError(
                    f"frozen asks for {name!r} as {form}, and it is trained: freeze it "
                    "(requires_grad_(False)), or let frozen give None for its module"
                )
            _check_shape(name, weight, form)
            forms[name] = form  # type: ignore[assignment]
    return forms


def coded_parameters(model: nn.Module, forms: Mapping[str, StoredName]) -> set[int]:
    """The ids of those that stored_forms() tells of."""
    return {id(parameter) for name, parameter in model.named_parameters() if name in forms}


def row_elements(shape: torch.Size) -> int:
    """Of a weight: elements of one output, which share a scale in int8."""
    return math.prod(shape[1:])


def _check_shape(name: str, weight: torch.Tensor, form: str) -> None:
    row = row_elements(weight.shape)
    if weight.numel() % BLOCK == 0 and (form != "int8" or row % BLOCK == 0):
        return
    what = "rows" if form == "int8" else "elements"
    raise ValueError(
        f"frozen={form!r}: the {what} of {name!r}, of shape {tuple(weight.shape)}, do not make "
        f"whole blocks of {BLOCK}: leave it as it is, by a function that gives None for its module"
    )


def _embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Those that map tokens to vectors, and back."""
    modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    last = getattr(model, "get_output_embeddings", None)
    if callable(last) and isinstance(head := last(), nn.Module):
        modules.append(head)  # type: ignore[arg-type]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]
