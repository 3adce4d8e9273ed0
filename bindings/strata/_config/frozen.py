"""Which frozen parameters rest as codes, and as which: what the keyword `frozen` of wrap() means.

    check_frozen("nf4")
    forms = stored_forms(model, is_trained, "nf4")       # {"layers.0.weight": "nf4", ...}

Pure but for looking at the model, and for a line in the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from .._errors import check_choice, listed
from ..nn.tiles import EmbeddingTile, Tiled
from .choices import AS_IS, FORMS
from .managed import is_of_adapter, is_of_peft

if TYPE_CHECKING:
    from .._core import StoredName

BLOCK = 64  # elements that share a scale: engine/../codes/form.hpp

Frozen = str | Callable[[str, nn.Module], str | None]
"""A form for all weights of layers, or what gives one for a module by its name, or None."""

Asked = Iterator[tuple[nn.Module, nn.Parameter, str]]
"""A module, a parameter of it, and the form that is asked for."""

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

log = logging.getLogger("strata")


def check_frozen(frozen: Frozen) -> None:
    """Raises ValueError for what is no form, and no function."""
    if not callable(frozen):
        check_choice("frozen", frozen, (AS_IS, *FORMS))


def stored_forms(
    model: nn.Module, is_trained: Callable[[nn.Parameter], bool], frozen: Frozen
) -> dict[str, StoredName]:
    """By name of the parameter. A form that is given for all means the weights of layers, without
    embeddings, the output layer and adapters. Raises ValueError for a parameter that cannot be
    stored so, and where a form for all finds none that is frozen, with what to do."""
    if frozen == AS_IS:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forms: dict[str, StoredName] = {}
    left = []
    asked = _by_function(model, frozen) if callable(frozen) else _of_layers(model, frozen)
    for module, weight, form in asked:
        name = names[id(weight)]
        if weight.requires_grad and callable(frozen):
            raise ValueError(_why_not_frozen(name, form, is_trained(weight)))
        if weight.requires_grad:
            left += [name] * (not is_trained(weight))
            continue
        _check_shape(name, weight, module, form)
        forms[name] = form  # type: ignore[assignment]
    if not forms and not callable(frozen):
        raise ValueError(_why_nothing(frozen, left))
    if left:
        log.info(
            "frozen=%r leaves parameters as they are that the optimizer does not have but that "
            "require gradients: %s; requires_grad_(False) has them stored",
            frozen,
            listed(left),
        )
    return forms


def coded_parameters(model: nn.Module, forms: Mapping[str, StoredName]) -> set[int]:
    """The ids of those that stored_forms() tells of."""
    return {id(parameter) for name, parameter in model.named_parameters() if name in forms}


def row_elements(module: nn.Module, shape: torch.Size) -> int:
    """Of a parameter of `module`: elements that share a scale in int8.

    The weights of one output, also of one expert's. Where outputs are the last dimension, as in
    Transformers' Conv1D, the weights of one input: scales go with elements that lie together.
    """
    if isinstance(module, CONVOLUTIONS) or len(shape) > 3:
        return math.prod(shape[1:])
    return shape[-1] if shape else 1


def _by_function(model: nn.Module, choose: Callable[[str, nn.Module], str | None]) -> Asked:
    """What a function asks for. It sees a layer that is cut into tiles as it was before, so the
    number of tiles changes no form."""
    tiles = {id(t) for m in model.modules() if isinstance(m, Tiled) for t in m.tiles}
    for path, module in model.named_modules():
        if id(module) in tiles:
            continue
        owners: list[nn.Module] = [module]
        seen = module
        if isinstance(module, Tiled):
            owners = list(module.tiles)
            seen = module.original[0] if module.original else module.plain()
        form = choose(path, seen)
        if form is None or form == AS_IS:
            continue
        check_choice("frozen", form, (AS_IS, *FORMS))
        for owner in owners:
            for weight in _own_weights(owner):
                yield owner, weight, form


def _own_weights(module: nn.Module) -> list[nn.Parameter]:
    """What a function means by a module: its weights of more than one dimension, or, where it has
    none, those of one, as a norm's. Never biases."""
    own = [p for name, p in module.named_parameters(recurse=False) if not name.endswith("bias")]
    return [p for p in own if p.dim() > 1] or own


def _of_layers(model: nn.Module, form: str) -> Asked:
    """What a form for all means."""
    kept = {id(p) for module in _kept_modules(model) for p in module.parameters()}
    for path, module in model.named_modules():
        for name in _weights_of_layer(module):
            weight = module._parameters.get(name)
            full = f"{path}.{name}" if path else name
            if weight is not None and id(weight) not in kept and not is_of_adapter(model, full):
                yield module, weight, form


def _weights_of_layer(module: nn.Module) -> tuple[str, ...]:
    """The names of a layer's own weights; none of a module that is no layer."""
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    if is_conv1d or isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return ("weight",)
    if isinstance(module, nn.MultiheadAttention):  # linear layers without modules of their own
        return PROJECTIONS
    return tuple(
        name
        for name, p in module.named_parameters(recurse=False)
        if not name.endswith("bias") and _is_of_experts(module, p)
    )


def _is_of_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether it is the weights of all experts in one, as Transformers has them."""
    if "expert" in type(module).__name__.lower():  # DBRX has the experts' rows below each other
        return parameter.dim() in (2, 3)
    return parameter.dim() == 3 and getattr(module, "num_experts", 0) == parameter.shape[0]


def _kept_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those that map tokens to vectors, and the last layer of a model of Transformers, also within
    another: what gives logits, or the head of a classifier."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | EmbeddingTile):
            yield module
            continue
        output = getattr(module, "get_output_embeddings", None)
        if not callable(output):
            continue
        if isinstance(last := output(), nn.Module):
            yield last  # with what PEFT has put around it, and its tiles
            continue
        # A class with a head has the model without it under this name.
        base = module._modules.get(getattr(module, "base_model_prefix", ""))
        parts = [part for part in module.children() if next(part.parameters(), None) is not None]
        if base is not None and not is_of_peft(module) and parts[-1] is not base:
            yield parts[-1]


def _why_not_frozen(name: str, form: str, trained: bool) -> str:
    what = (
        "it is trained"
        if trained
        else "it requires a gradient, which the optimizer does not have it for"
    )
    return (
        f"frozen asks for {name!r} as {form}, and {what}: freeze it (requires_grad_(False)), or "
        "let frozen give None for its module"
    )


def _why_nothing(frozen: Frozen, left: list[str]) -> str:
    gradients = (
        f" ({listed(left)}: not in the optimizer, but they require gradients)" if left else ""
    )
    return (
        f"frozen={frozen!r} finds no frozen weight of a layer to store{gradients}: freeze the base "
        "(requires_grad_(False)), leave frozen out, or pass a function that gives a form for "
        "modules by name"
    )


def _check_shape(name: str, weight: torch.Tensor, module: nn.Module, form: str) -> None:
    row = row_elements(module, weight.shape)
    if weight.numel() % BLOCK == 0 and (form != "int8" or row % BLOCK == 0):
        return
    what = "rows" if form == "int8" else "elements"
    raise ValueError(
        f"frozen={form!r}: the {what} of {name!r}, of shape {tuple(weight.shape)}, do not make "
        f"whole blocks of {BLOCK}: leave it as it is, by a function that gives None for its module"
    )
