"""Writes a safetensors file, one tensor in memory at a time.

    stream_file(tensors, "model.safetensors", {"format": "pt"})
    stream_paged()                      # safetensors.torch does so as well: save_file, save

The file is, byte for byte, the one that safetensors.torch.save_file writes of the same values:
eight bytes with the length of the header, little-endian; the header, JSON, padded with spaces to a
multiple of eight; the tensors, wider elements first, then by name. It appears complete or not at
all.

Note [Everybody's saving]. `save_pretrained` of Transformers and PEFT, Accelerate and
huggingface_hub all end in safetensors.torch.save_file, which wants the addresses of all tensors of
a file at once, and so does safetensors.torch.save, whose bytes some write by themselves.
Transformers gives tensors their names in files before that, and cuts them, all in memory. Many
have taken these functions under names of their own long before a model is wrapped. So
what is changed is their code: where any of the tensors is paged they are streamed, and all else
goes where it always went.
"""

import io
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch

from .._runtime.paged_run import is_paged
from .._runtime.stand_in import StandIn

# Names of dtypes, in the order in which files have their tensors.
_DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PLACES = {dtype: place for place, dtype in enumerate(_DTYPES)}
_BUFFER_BYTES = 1 << 20
# Of others, as they are for tensors in memory, by name.
plain: dict[str, Callable[..., Any]] = {}


def stream_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the tensors; any may be paged, or a stand-in. Raises ValueError, as safetensors
    does, for what its files cannot hold, RuntimeError for two names of one parameter, and OSError.
    """
    _check(tensors)
    path = Path(filename)
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a process that was killed; were it a link, not followed
        with part.open("xb", buffering=_BUFFER_BYTES) as file:
            _write(file, tensors, metadata)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def to_bytes(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What stream_file() would write, which is as much memory. Raises as that does."""
    _check(tensors)
    file = io.BytesIO()
    _write(file, tensors, metadata)
    return file.getvalue()


def _write(
    file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> None:
    names = sorted(tensors, key=lambda name: (_PLACES[tensors[name].dtype], name))
    file.write(header(tensors, names, metadata))
    for name in names:
        plain = tensors[name].detach().to("cpu", copy=True)
        file.write(plain.reshape(-1).view(torch.uint8).numpy().data)


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    firsts: dict[int, str] = {}  # by the address of a whole paged parameter
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name!r} is {tensor.dtype} of layout {tensor.layout}, which safetensors lacks"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r} is not contiguous: save a copy of it (.contiguous())")
        if not is_paged(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            continue
        first = firsts.setdefault(storage.data_ptr(), name)
        if first != name:
            raise RuntimeError(
                f"{first!r} and {name!r} are one tied parameter: leave one of them out, or use "
                "strata.export_safetensors"
            )


def header(
    tensors: Mapping[str, torch.Tensor], names: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    """What a file of these tensors begins with; they lie behind it in the order of `names`."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_paged() -> None:
    """From now on safetensors.torch streams paged tensors, and so does what Transformers makes of
    them ahead of it. See Note [Everybody's saving]."""
    _exchange(safetensors.torch.save_file, _save_file)
    _exchange(safetensors.torch.save, _save)
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if hasattr(loading, "PrefixChange"):  # see conversion.py
        _exchange(loading.revert_weight_conversion, _revert_weight_conversion)


def rests(tensor: Any) -> bool:
    """Whether its values are elsewhere than in its memory."""
    return is_paged(tensor) or isinstance(tensor, StandIn)


def _exchange(theirs: Any, ours: Any) -> None:
    """Gives a function the code of ours, once."""
    if theirs.__name__ not in plain:
        plain[theirs.__name__] = types.FunctionType(
            theirs.__code__, theirs.__globals__, argdefs=theirs.__defaults__
        )
        theirs.__code__ = ours.__code__


def _save_file(tensors, filename, metadata=None):  # type: ignore[no-untyped-def]
    # The globals are those of safetensors.torch.
    from strata._storage import saved_file

    if isinstance(tensors, dict) and any(map(saved_file.rests, tensors.values())):
        return saved_file.stream_file(tensors, filename, metadata)
    return saved_file.plain["save_file"](tensors, filename, metadata)


def _save(tensors, metadata=None):  # type: ignore[no-untyped-def]
    # The globals are those of safetensors.torch.
    from strata._storage import saved_file

    if isinstance(tensors, dict) and any(map(saved_file.rests, tensors.values())):
        return saved_file.to_bytes(tensors, metadata)
    return saved_file.plain["save"](tensors, metadata)


def _revert_weight_conversion(model, state_dict):  # type: ignore[no-untyped-def]
    # The globals are those of transformers.core_model_loading.
    from strata._storage import conversion, saved_file

    if any(map(saved_file.rests, state_dict.values())):
        return conversion.as_in_files(model, state_dict)
    return saved_file.plain["revert_weight_conversion"](model, state_dict)
