"""Writes tests/cpp/golden_codes.hpp: what bitsandbytes and torchao make of a few hundred values.

python tests/golden_codes.py > tests/cpp/golden_codes.hpp

It needs both packages beside torch, so the file that it writes is kept and no suite runs this.
"""

import importlib.metadata
from collections.abc import Iterable

import bitsandbytes.functional as bnb
import numpy as np
import torch
from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

COUNT = 512
ROW = 128
STEP = 4  # of the values, every fourth is kept


def weights() -> torch.Tensor:
    """Any sign, any mantissa, magnitudes from 2^-5 to 2^-2: plain_weights() of the suite."""
    state, halves = 1, []
    for _ in range(COUNT):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        halves.append(0x3D00 ^ ((state >> 40) & 0x81FF))
    return torch.from_numpy(np.array(halves, np.uint16).view(np.int16)).view(torch.bfloat16)


def bits(tensor: torch.Tensor) -> list[int]:
    """Each element as an unsigned integer of its width."""
    widths = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return [
        int(x) for x in tensor.reshape(-1).view(whole).numpy().view(widths[tensor.element_size()])
    ]


def kept(values: torch.Tensor) -> torch.Tensor:
    """Every fourth, in one row."""
    return values.flatten()[::STEP].contiguous()


def show(name: str, kind: str, numbers: Iterable[int]) -> None:
    """One array."""
    digits = {"std::uint8_t": 2, "std::uint16_t": 4, "std::uint32_t": 8}[kind]
    listed = [f"0x{number:0{digits}x}" for number in numbers]
    print(f"inline constexpr {kind} {name}[{len(listed)}] = {{{', '.join(listed)}}};")


def torchao_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of four blocks whose scales share a factor of 48 and a mean of 0.4."""
    meta = nf4_tensor.SubclassTensorArgs(
        torch.Size((4, 64)), (64, 1), 0, dtype, torch.device("cpu"), False
    )
    table = nf4_tensor.to_nf4(torch.zeros(256, 64, dtype=dtype)).nf4
    scales = torch.tensor([3, -11, 127, -128], dtype=torch.int8)
    factor, mean = torch.tensor([48.3], dtype=dtype), torch.tensor(0.4, dtype=dtype)
    made = nf4_tensor.NF4Tensor(meta, 64, 4, 4, scales, factor, mean, codes[:128].flatten(), table)
    return made.get_original_weight()


def main() -> None:
    """Prints the header."""
    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in ("bitsandbytes", "torchao")}
    print("// What the libraries make of plain_weights() in codes_test.cpp, as bits.")
    print(f"// Written by tests/golden_codes.py with {versions}, torch {torch.__version__}.")
    print("#pragma once\n\n#include <cstdint>\n\nnamespace strata::golden {\n")
    weight = weights()
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4")
    show("kNf4Codes", "std::uint8_t", bits(codes))
    show("kAbsmax", "std::uint32_t", bits(state.absmax))
    show("kNf4Values", "std::uint16_t", bits(kept(bnb.dequantize_4bit(codes, state))))
    state.dtype = torch.float32
    show("kNf4Floats", "std::uint32_t", bits(kept(bnb.dequantize_4bit(codes, state))))
    _, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    show("kScaleCodes", "std::uint8_t", bits(state.absmax))
    show("kFactorAndOffset", "std::uint32_t", bits(state.state2.absmax) + bits(state.offset))
    show("kDoubleValues", "std::uint16_t", bits(kept(bnb.dequantize_4bit(codes, state))))
    rows, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.view(-1, ROW))
    show("kInt8Codes", "std::uint8_t", bits(rows))
    show("kRowMax", "std::uint32_t", bits(scales))
    values = bnb.int8_vectorwise_dequant(rows, scales).to(torch.bfloat16)
    show("kInt8Values", "std::uint16_t", bits(kept(values)))
    for name, dtype in (("Halves", torch.bfloat16), ("Floats", torch.float32)):
        kind = "std::uint16_t" if dtype == torch.bfloat16 else "std::uint32_t"
        show(f"kTorchao{name}", kind, bits(kept(torchao_values(codes, dtype))))
    show("kDynamicMapBits", "std::uint32_t", bits(bnb.create_dynamic_map()))
    print("\n}  // namespace strata::golden")


if __name__ == "__main__":
    main()
