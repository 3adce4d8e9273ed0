"""Writes a wrapped model in the layout of `save_pretrained`, one shard in memory at a time.

    strata.export_safetensors(model, "out/")
    AutoModelForCausalLM.from_pretrained("out/")

Files: model.safetensors, or model-00001-of-000NN.safetensors with model.safetensors.index.json as
Transformers reads them; config.json and generation_config.json where the model has them. A tied
parameter is stored once, under its first name, and the tiles of a layer as the tensor they are cut
from. How they take the places of an older export is said in export_files.py.
"""

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from .._runtime.visits import Visit
from .._runtime.wrapped import wrapped
from .checkpoint_files import BUFFER_BYTES
from .export_files import SINGLE_NAME, replace_export, save_shard, write_index
from .stored import stored_tensors
from .weights import persistent_buffers

SHARD_BYTES = 256 << 20


def export_safetensors(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the newest parameters of `model` into the folder `path`.

    `dtype` of the file: default that of the computation. Memory used: one shard of at most
    `shard_bytes`, or the largest parameter where that is more. An earlier export in `path` is
    replaced, and loads until the new one does, so the disk holds both for a while. Others stay.
    Raises FileExistsError where `path` holds weights, or config files, that strata did not export,
    and OSError where it cannot be written.
    """
    source = _Source(model, dtype)
    shards = list(_shards(source.sizes, shard_bytes))
    files: dict[str, str] = {}
    with replace_export(Path(path)) as folder:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            file = SINGLE_NAME if len(shards) == 1 else file
            save_shard({name: source.tensor(name) for name in names}, folder / file)
            files |= dict.fromkeys(names, file)
        _save_configs(model, folder, source.common_dtype())
        if len(shards) > 1:
            write_index(folder, files, sum(source.sizes.values()))


class _Source:
    """The tensors to write, by name, read from their pages one at a time."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        state = wrapped(model)
        state.check_parameters()
        state.hooks.reset()
        state.refuse_half_step("export_safetensors()")
        state.synchronize()
        self._state = state
        specs = state.config["params"]
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(model)}
        self._dtypes: dict[str, torch.dtype] = {
            name: dtype or getattr(torch, specs[tensor.parts[0]]["dtype"])
            for name, tensor in self._tensors.items()
        }
        self._buffers = persistent_buffers(model)
        self.sizes = {
            name: tensor.numel * self._dtypes[name].itemsize
            for name, tensor in self._tensors.items()
        } | {name: value.nbytes for name, value in self._buffers.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter or buffer, in memory of its own."""
        if name in self._buffers:
            return self._buffers[name].detach().cpu().clone().contiguous()
        tensor = self._tensors[name]
        result = torch.empty(tensor.shape, dtype=self._dtypes[name], device="cpu")
        rows = result.reshape(-1).split([math.prod(shape) for shape in tensor.part_shapes])
        for param, part in zip(tensor.parts, rows, strict=True):
            self._read(param, part)
        return result

    def _read(self, param: int, result: torch.Tensor) -> None:
        """Fills `result`, which is flat, with a parameter."""
        if result.dtype == self._state.aliases[param].dtype:
            self._read_computed(param, result)
            return
        count = min(result.numel(), BUFFER_BYTES // 4)
        staging = torch.empty(count, dtype=torch.float32, device="cpu")
        for begin in range(0, result.numel(), max(1, staging.numel())):
            values = staging[: result.numel() - begin]
            self._state.session.read(param, "master", begin, values.data_ptr(), values.numel())
            result[begin : begin + values.numel()] = values

    def _read_computed(self, param: int, result: torch.Tensor) -> None:
        """A parameter as the device computes with it; rounding its master may give a neighbour."""
        unit = self._state.unit_of[param]
        visit = self._state.visits.add(Visit())
        try:
            self._state.enter(unit, visit)
            result.copy_(self._state.aliases[param].detach().reshape(-1))
        finally:
            self._state.leave(unit, visit)
            self._state.visits.end(visit)

    def common_dtype(self) -> torch.dtype:
        """The dtype of most bytes: what config.json says of the whole."""
        bytes_of = dict.fromkeys(self._dtypes.values(), 0)
        for name, dtype in self._dtypes.items():
            bytes_of[dtype] += self.sizes[name]
        return max(bytes_of, key=lambda dtype: bytes_of[dtype])


def _shards(sizes: dict[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """The names in their order, cut where a shard would become too large."""
    names: list[str] = []
    used = 0
    for name, size in sizes.items():
        if names and used + size > shard_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    if names:
        yield names


def _save_configs(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    """What Transformers needs to build the model again; nothing for other models."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(path)
