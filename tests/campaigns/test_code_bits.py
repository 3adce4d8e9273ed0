"""Stored forms against the libraries that they come from: codes, scales and values of frozen
parameters have the same bits as in bitsandbytes and torchao. tests/cpp/codes_test.cpp shows that
every instruction set gives the same bits.

It runs where both packages are installed. STRATA_VALUES=100000000 is a campaign.
"""

from __future__ import annotations

from typing import Any

import pytest
import strata
import torch
from campaign import SEED, tries
from strata._runtime import coded
from strata._runtime.wrapped import wrapped
from torch import nn

ROWS, COLUMNS, BLOCK = 1024, 1024, 64
DTYPES = (torch.bfloat16, torch.float32)


def drawn(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Normal values; each block has a magnitude of its own, from 1e-6 to 100."""
    values = torch.randn(ROWS * COLUMNS // BLOCK, BLOCK, generator=generator)
    magnitudes = 10 ** (torch.rand(len(values), 1, generator=generator) * 8 - 6)
    return (values * magnitudes).reshape(ROWS, COLUMNS).to(dtype)


def ours(weight: Any, form: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Codes, scales and factors with offsets, and the values that a layer computes with."""
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, 1)).to(dtype)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    memory = {"device": "64MiB", "host": "64MiB"}
    optimizer = torch.optim.AdamW(model[1].parameters())
    model, _ = strata.wrap(
        model, optimizer, memory=memory, frozen=form, dtype=dtype, activations=None, device="host"
    )
    state = wrapped(model)
    index = state.names.index("0.weight")
    parts, values = coded.read(state, index), state.read(index).to(dtype)
    state.session.close()
    return parts, values


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, whatever the shapes."""
    flat = [each.contiguous().flatten().view(torch.uint8) for each in (mine, theirs)]
    return torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["nf4", "nf4-double", "int8"])
def test_bitsandbytes_has_the_same_bits(form: str, dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(-(-tries("STRATA_VALUES", 1) // (ROWS * COLUMNS))):
        weight = drawn(generator, dtype)
        parts, values = ours(weight, form, dtype)
        if form == "int8":
            codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
            expected = bnb.int8_vectorwise_dequant(codes, scales).to(dtype)
            parts[1] = parts[1].reshape(ROWS, -1)[:, 0]  # one for each row
            theirs = [codes, scales]
        else:
            double = form == "nf4-double"
            codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
            expected = bnb.dequantize_4bit(codes, state)
            theirs = [codes, state.absmax]
            if double:
                offsets = state.offset.expand_as(state.state2.absmax)
                theirs.append(torch.stack([state.state2.absmax, offsets], 1))
        for mine, their in zip(parts, theirs, strict=True):
            assert same(mine, their), form
        assert same(values, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchao_has_the_same_values(dtype: torch.dtype) -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(-(-tries("STRATA_VALUES", 1) // (ROWS * COLUMNS))):
        weight = nf4.to_nf4(drawn(generator, dtype))
        _, values = ours(weight, "nf4-torchao", dtype)
        assert same(values, weight.get_original_weight())
