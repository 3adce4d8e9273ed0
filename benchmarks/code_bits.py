"""Stored forms against the libraries that they come from: codes, scales and dequantised values have
the same bits as in bitsandbytes and torchao. Every instruction set and dtype takes its slices.

It runs where both packages are installed, for instance in an environment over .venv:
    python -m benchmarks code-bits
"""

import itertools
import json
import mmap
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .common import ROOT, BenchError, Context, Figure

PROGRAM = ROOT / "build/release/benchmarks/code_values"
COUNT = 100_000_000
SLICE = 1 << 22
ROW = 1 << 10
BLOCK = 64
GROUP = 256  # blocks
FILE_BYTES = 64 << 20
ISAS = ("scalar", "avx2", "avx512")
DTYPES = (torch.bfloat16, torch.float32)

Count = tuple[int, int]


class Kernels:
    """strata's kernels, in a process that shares a file with this one."""

    def __init__(self, isa: str) -> None:
        if not PROGRAM.exists():
            raise BenchError(f"{PROGRAM} is not built")
        self.isa = isa
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (close() closes it)
        self._file.truncate(FILE_BYTES)
        self._memory = np.frombuffer(mmap.mmap(self._file.fileno(), FILE_BYTES), np.uint8)
        self._process = subprocess.Popen(
            [str(PROGRAM), self._file.name, str(FILE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._answer()

    def close(self) -> None:
        """Lets the process end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._file.close()

    def quantise(
        self, form: str, values: torch.Tensor, row: int = BLOCK, offset: float = 0.0
    ) -> Mapping[str, torch.Tensor]:
        """Codes, scales (one for each block) and groups (two float32 each) of the values."""
        count = values.numel()
        self._write(0, values)
        job = f"quantise {form} {text(values.dtype)} {count} {row} {offset:.9g} {self.isa}"
        where = self._ask(job)
        code = torch.int8 if form == "int8" else torch.uint8
        scale = torch.uint8 if form == "nf4-double" else torch.float32
        groups = -(-count // (BLOCK * GROUP)) * 2 if form == "nf4-double" else 0
        return {
            "codes": self._read(where["codes"], code, count if form == "int8" else count // 2),
            "scales": self._read(where["scales"], scale, count // BLOCK),
            "groups": self._read(where["groups"], torch.float32, groups),
        }

    def dequantise(
        self,
        form: str,
        parts: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        to: torch.dtype,
        arithmetic: str = "bitsandbytes",
    ) -> torch.Tensor:
        """The values of those parts."""
        count = parts["codes"].numel() * (1 if form == "int8" else 2)
        where = self._ask(f"place {form} {count}")
        for name, part in parts.items():
            self._write(where[name], part)
        job = f"dequantise {form} {arithmetic} {text(dtype)} {count} {text(to)} {self.isa}"
        self._ask(job)
        return self._read(0, to, count)

    def _write(self, at: int, tensor: torch.Tensor) -> None:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._memory[at : at + raw.size] = raw

    def _read(self, at: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        read = torch.empty(count, dtype=dtype)
        raw = self._memory[at : at + count * dtype.itemsize]
        read.view(torch.uint8).copy_(torch.from_numpy(raw))
        return read

    def _ask(self, job: str) -> Mapping[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(job + "\n")
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{PROGRAM} died")
        answer: Mapping[str, Any] = json.loads(line)
        return answer


def text(dtype: torch.dtype) -> str:
    """The name that strata has for it."""
    return str(dtype).removeprefix("torch.")


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> Count:
    """Elements whose bits differ, of how many."""
    assert ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[ours.itemsize]
    flat = theirs.contiguous().view(-1)
    return int((ours.view(width) != flat.view(width)).sum()), flat.numel()


def draw(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Normal values; each block has a magnitude of its own, from 1e-6 to 100."""
    values = torch.randn(SLICE // BLOCK, BLOCK, generator=generator)
    magnitudes = 10 ** (torch.rand(SLICE // BLOCK, 1, generator=generator) * 8 - 6)
    return (values * magnitudes).flatten().to(dtype)


def against_bitsandbytes(kernels: Kernels, weight: torch.Tensor) -> Iterator[tuple[str, Count]]:
    """What differs, of every form."""
    import bitsandbytes.functional as bnb

    dtype = weight.dtype
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4")
    ours = kernels.quantise("nf4", weight)
    yield "nf4_codes", differing(ours["codes"], codes)
    yield "nf4_scales", differing(ours["scales"], state.absmax)
    values = kernels.dequantise("nf4", ours, dtype, dtype)
    yield "nf4_values", differing(values, bnb.dequantize_4bit(codes, state))

    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    ours = kernels.quantise("nf4-double", weight, offset=float(state.offset))
    yield "nf4-double_codes", differing(ours["codes"], codes)
    yield "nf4-double_scales", differing(ours["scales"], state.absmax)
    yield "nf4-double_factors", differing(ours["groups"][::2].contiguous(), state.state2.absmax)
    values = kernels.dequantise("nf4-double", ours, dtype, dtype)
    yield "nf4-double_values", differing(values, bnb.dequantize_4bit(codes, state))

    rows, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.view(-1, ROW))
    ours = kernels.quantise("int8", weight, ROW)
    yield "int8_codes", differing(ours["codes"], rows)
    yield "int8_scales", differing(ours["scales"][:: ROW // BLOCK].contiguous(), scales)
    values = kernels.dequantise("int8", ours, torch.float32, dtype)
    yield "int8_values", differing(values, bnb.int8_vectorwise_dequant(rows, scales).to(dtype))


def against_torchao(
    kernels: Kernels, generator: torch.Generator, dtype: torch.dtype
) -> Iterator[tuple[str, Count]]:
    """Values of random codes and scales, and of a tensor that torchao quantised."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import (
        NF4Tensor,
        SubclassTensorArgs,
        to_nf4,
    )

    made = to_nf4(draw(generator, dtype).view(-1, ROW))
    yield "torchao_values", torchao_differs(kernels, made, dtype)
    blocks = SLICE // BLOCK
    shape = torch.Size((SLICE // ROW, ROW))
    meta = SubclassTensorArgs(shape, (ROW, 1), 0, dtype, torch.device("cpu"), False)
    scales = torch.randint(-128, 128, (blocks,), generator=generator, dtype=torch.int8)
    factors = (10 ** (torch.rand(blocks // GROUP, generator=generator) * 5)).to(dtype)
    mean = torch.rand((), generator=generator).to(dtype)
    codes = torch.randint(0, 256, (SLICE // 2,), generator=generator, dtype=torch.uint8)
    drawn = NF4Tensor(meta, BLOCK, blocks, GROUP, scales, factors, mean, codes, made.nf4)
    yield "torchao_random_values", torchao_differs(kernels, drawn, dtype)


def torchao_differs(kernels: Kernels, weight: Any, dtype: torch.dtype) -> Count:
    """Values of one of its tensors that ours are not."""
    factors = weight.quantization_factor.float()
    means = weight.scaler_mean.float().expand_as(factors)
    parts = {
        "codes": weight.quantized_data,
        "scales": weight.quantized_scalers,
        "groups": torch.stack([factors, means], dim=1),
    }
    values = kernels.dequantise("nf4-double", parts, dtype, dtype, "torchao")
    return differing(values, weight.get_original_weight())


def run(context: Context) -> Iterator[Figure]:
    """Yields how many of so many elements differ, for codes, scales and values of every form."""
    try:
        import bitsandbytes  # noqa: F401
        import torchao  # noqa: F401
    except ImportError as error:
        raise BenchError(f"needs bitsandbytes and torchao: {error}") from error
    slices = 1 if context.quick else -(-COUNT // SLICE)
    generator = torch.Generator().manual_seed(context.seed)
    found: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    sides = [Kernels(isa) for isa in ISAS]
    try:
        for index in range(slices):
            kernels, dtype = sides[index % 3], DTYPES[index % 2]
            weight = draw(generator, dtype)
            checks = itertools.chain(
                against_bitsandbytes(kernels, weight), against_torchao(kernels, generator, dtype)
            )
            for name, (wrong, count) in checks:
                found[name] += wrong
                compared[name] += count
            differ = {name: count for name, count in found.items() if count}
            context.say(
                f"{(index + 1) * SLICE:,} values, {kernels.isa}, {dtype}: {differ or 'equal'}"
            )
    finally:
        for kernels in sides:
            kernels.close()
    for name in found:
        yield Figure("code-bits", f"{name}_differ", found[name], f"of {compared[name]}", 0.0)
