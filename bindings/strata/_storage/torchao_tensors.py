"""Weights that torchao has quantised: its NF4Tensor, in a file or as a parameter of a model.

    found = codes_of("layers.0.weight", tensor)    # ReadyCodes; ValueError where it is damaged
    refuse_others(file.metadata())                 # what its safetensors hold is no NF4

An NF4Tensor has its codes in `quantized_data`, scales of 8 bits in `quantized_scalers`, a factor
for each 256 of these in `quantization_factor`, what is added to all in `scaler_mean`, and the
values of codes in `nf4`. torchao need not be installed: only attributes are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .._config.frozen import BLOCK
from .._config.managed import DTYPE_NAMES
from .._runtime.coded import GROUP
from .._runtime.ready_codes import SCALE_BLOCK, TORCHAO, ReadyCodes, values_of_codes

PARTS = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")


def codes_of(name: str, tensor: torch.Tensor) -> ReadyCodes:
    """What an NF4Tensor is made of. Raises ValueError where strata does not compute with such
    codes, or parts do not go together; `name`: of the weight."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name!r} is an NF4Tensor of torchao, and cannot be read: {what}")

    parts: dict[str, Any] = {part: getattr(tensor, part, None) for part in PARTS}
    for part, value in parts.items():
        require(type(value) in (torch.Tensor, torch.nn.Parameter), f"it has no {part}")
    for size, wanted in (("block_size", BLOCK), ("scaler_block_size", SCALE_BLOCK)):
        given = getattr(tensor, size, None)
        require(given == wanted, f"{size} is {given!r:.50}, and {wanted} is what strata knows")
    require(tensor.dtype in DTYPE_NAMES, f"it is of {tensor.dtype}")
    require(tensor.is_contiguous(), "it is a transposed view")
    numel = tensor.numel()
    require(numel > 0 and numel % GROUP == 0, f"its elements make no whole blocks of {GROUP}")
    counts = (numel // 2, numel // BLOCK, numel // GROUP, 1, 16)
    dtypes = (torch.uint8, torch.int8, tensor.dtype, tensor.dtype, tensor.dtype)
    flat = []
    for part, count, dtype in zip(PARTS, counts, dtypes, strict=True):
        value = parts[part].detach().to("cpu").contiguous().reshape(-1)
        require(value.dtype == dtype, f"{part} is {value.dtype}, not {dtype}")
        require(value.numel() == count, f"{part} has {value.numel()} numbers, not {count}")
        flat.append(value)
    codes, scales, factors, mean, table = flat
    same = torch.equal(table, values_of_codes(TORCHAO).to(tensor.dtype))
    require(same, "its codes stand for other values than torchao's")
    # It divides by factors: an infinite one stands for scales that are all alike.
    require(not bool((factors.isnan() | (factors == 0)).any()), "a scale is not finite")
    require(bool(mean.isfinite()), "a scale is not finite")
    both = torch.stack([factors.float(), mean.float().expand(len(factors))], dim=-1).reshape(-1)
    return ReadyCodes(
        TORCHAO, tuple(tensor.shape), tensor.dtype, [codes, scales.view(torch.uint8), both]
    )


def parts_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold an NF4Tensor's values. REQUIRES: codes_of() takes it."""
    return [getattr(parameter, part) for part in PARTS]


def refuse_others(metadata: Mapping[str, Any] | None) -> None:
    """Raises ValueError for a safetensors file in which torchao says that weights are quantised:
    NF4 is none of the forms that it writes there."""
    for name, text in (metadata or {}).items() if metadata and "tensor_names" in metadata else ():
        try:
            kind = json.loads(text)["_type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # of somebody else
        if kind != "Tensor":
            raise ValueError(
                f"{name!r} is quantised by torchao as {kind!r:.50}: strata reads its NF4Tensor "
                "from files of torch.save(), and NF4 and int8 of bitsandbytes"
            )
