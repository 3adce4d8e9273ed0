"""Loading checkpoints, streamed through a bounded buffer.

    extra = strata.load(model, "checkpoint/")          # same model, any budgets, any page size

The format is described in saving.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .._optim.groups import moments_of
from .._runtime.coded import KINDS, kinds
from .._runtime.optimizer import StrataOptimizer
from .._runtime.wrapped import Wrapped, wrapped
from .._torch_compat import copy_rows
from . import coded, rng
from .checkpoint_files import (
    BUFFER_BYTES,
    CheckpointError,
    Record,
    TensorReader,
    find,
)
from .checkpoint_manifest import check, merged
from .extra_state import saved_extra_state, set_extra_state
from .extras import from_json
from .manifests import damaged, read_checkpoint
from .saved_values import to_plain
from .stored import StoredTensor, persistent_buffers, stored_tensors
from .tiled import say_of_tiles
from .together import Together, keeper_of, owned

if TYPE_CHECKING:
    from .._core import ParamSpec  # types only: the stub's, not the core's

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def load(model: nn.Module, path: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Continues from a checkpoint: weights, moments, steps, hyperparameters, buffers, randomness.

    Budgets, page size and disks may differ from those of the run that saved it. Returns `extra`.
    Raises CheckpointError, before anything is changed, where there is no complete checkpoint, where
    it is damaged, or of another model. Where an exception ends it later, Ctrl-C too, everything
    else is refused until a load has come to its end.
    """
    state = wrapped(model)
    together = Together.of(state, "strata.load()")
    with contextlib.ExitStack() as stack:
        # 1. All have found the same checkpoint, and it is whole: each rank looks at a part.
        with together.phase() as phase:
            folder = find(path)
            if folder is None:
                raise CheckpointError(f"no complete checkpoint at {path}")
            manifest = read_checkpoint(folder)
            check(manifest, wanted_of(state), str(folder))
            sizes = {entry["file"]: entry["bytes"] for entry in manifest["files"]}
            file = stack.enter_context(TensorReader(folder, sizes))
            say_of_tiles(state, manifest, folder)
            groups = merged_groups(state, manifest["groups"], folder)
            of_modules = saved_extra_state(manifest, model, str(folder))
            own = said_by(manifest, together)
            with damaged(f"{folder} is a damaged checkpoint"):
                rng.check(own["rng"])
                extra: dict[str, Any] = from_json(own["extra"], [])
            tensors = stored_tensors(model)
            meter = Meter(progress, 2 * manifest["bytes"])
            mine = list(_part(state, tensors, manifest, together.rank))
            file.verify(mine, meter.add)
            meter.add(manifest["bytes"] - sum(record["bytes"] for _, record in mine))
            phase.said = str(folder)
        together.agree("paths", phase.heard)
        # 2. It takes the place of what the model has.
        with together.phase():
            state.hooks.reset()
            state.steps.forget()
            for tensor, entry in zip(tensors, manifest["params"], strict=True):
                if "stored" in entry:
                    coded.restore(state, tensor, entry["tensors"], file, meter.add)
                for record in entry["tensors"] if "stored" not in entry else ():
                    _restore(state, tensor, record, file, together.rank, meter)
                for place in tensor.parts:
                    state.session.set_param_step(place, entry["step"])
            buffers = persistent_buffers(model)
            for entry in manifest["buffers"]:
                raw = b"".join(bytes(c) for c in meter(file.chunks(entry["tensors"][0])))
                set_buffer(buffers[entry["name"]], raw)
            state.steps_before = manifest["step"] - state.session.steps()
            restore_context(state, groups, own["rng"])
    state.steps.end_load()
    set_extra_state(model, of_modules)
    state.last_saved = folder
    return extra


def said_by(manifest: dict[str, Any], together: Together) -> dict[str, Any]:
    """Random states and extras for this rank: its own, where there were as many ranks; else those
    of rank 0."""
    others: list[dict[str, Any]] = manifest.get("others", [])
    same = together.count == 1 + len(others)
    return others[together.rank - 1] if same and together.rank > 0 else manifest


def restore_context(state: Wrapped, groups: list[dict[str, Any]], states: dict[str, Any]) -> None:
    """Hyperparameters, and random states as rng.capture() gave them."""
    options = state.optimizer.defaults
    for group, new in zip(state.optimizer.param_groups, groups, strict=True):
        for key, value in new.items():
            if key in options and isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    rng.restore(states)


def _part(
    state: Wrapped, tensors: list[StoredTensor], manifest: dict[str, Any], rank: int
) -> Iterator[tuple[str, Record]]:
    """The tensors of the file that a rank verifies, with their names: all of them have one."""
    keepers = {tensor.name: keeper_of(state, tensor.parts) for tensor in tensors}
    for entry in (*manifest["params"], *manifest["buffers"]):
        if keepers.get(entry["name"], 0) == rank:
            for record in entry["tensors"]:
                yield entry["name"], record


@dataclass
class Meter:
    """Counts bytes on their way and tells whoever watches."""

    _progress: Progress | None
    _total: int
    _done: int = 0

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def __call__(self, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            yield chunk
            self.add(len(chunk))


def stored_kinds(
    state: Wrapped, spec: ParamSpec, tensor: StoredTensor
) -> list[tuple[str, str, int]]:
    """What is stored of a tensor: the kind, its dtype, and how many of that."""
    if "stored" in spec:
        return kinds(spec["stored"], *tensor.part_numels)
    numel = tensor.numel
    if not spec["trainable"]:
        return [("master", spec["dtype"], numel)]
    moments = moments_of(state.config["groups"][spec["group"]])
    found = ("master", "moment1", "moment2")[: 1 + len(moments)]
    return [(kind, "float32", numel) for kind in found]


def stored_values(
    state: Wrapped, tensor: StoredTensor, record: Record, buffer: torch.Tensor
) -> Iterator[memoryview]:
    """One tensor, from the pages of its parameters, in its dtype on disk."""
    if record["kind"] in KINDS:
        yield from coded.values(state, tensor, record["kind"])
        return
    for param in tensor.parts:
        numel = state.config["params"][param]["numel"]
        for begin in range(0, numel, buffer.numel()):
            values = buffer[: numel - begin]
            state.session.read(param, record["kind"], begin, values.data_ptr(), values.numel())
            yield from raw_bytes(values.to(getattr(torch, record["dtype"])))


def _restore(
    state: Wrapped,
    tensor: StoredTensor,
    record: Record,
    file: TensorReader,
    rank: int,
    meter: Meter,
) -> None:
    """What this rank owns of a tensor. All ranks make the same calls of write(), and the core takes
    from each what is the rank's own: the rest of `values` is never looked at, nor read here."""
    dtype = getattr(torch, record["dtype"])
    values = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device="cpu")
    at = 0  # of the part, in the record
    for part, numel in zip(tensor.parts, tensor.part_numels, strict=True):
        runs = owned(state, part, rank)
        for begin in range(0, numel, values.numel()):
            here = values[: numel - begin]
            for first, count in within(runs, begin, here.numel()):
                to = first - begin
                for chunk in file.chunks(
                    record, at + first * dtype.itemsize, count * dtype.itemsize
                ):
                    read = torch.frombuffer(chunk, dtype=dtype)
                    here[to : to + read.numel()] = read
                    to += read.numel()
            state.session.write(part, record["kind"], begin, here.data_ptr(), here.numel())
            meter.add(here.numel() * dtype.itemsize)
        at += numel * dtype.itemsize


def within(runs: list[tuple[int, int]], begin: int, count: int) -> Iterator[tuple[int, int]]:
    """What of the runs, each (first, count), lies in so many elements from `begin` on."""
    for first, length in runs:
        low, high = max(first, begin), min(first + length, begin + count)
        if low < high:
            yield low, high - low


def raw_bytes(value: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in memory."""
    if value.numel():
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = plain.reshape(-1)  # one element may have any stride
        yield flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def set_buffer(target: torch.Tensor, raw: bytes) -> None:
    if not raw:
        return
    value = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(target.dtype)
    copy_rows(target, value.reshape(target.shape))


def check_buffers(model: nn.Module) -> None:
    """Raises CheckpointError for a buffer whose bytes are not its values."""
    check_dense(persistent_buffers(model))


def check_dense(buffers: dict[str, torch.Tensor]) -> None:
    """Likewise."""
    for name, value in buffers.items():
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(
                f"buffer {name!r} is {'quantized' if value.is_quantized else value.layout}, which "
                "no checkpoint holds: make it dense, or not persistent"
            )


def plain_groups(state: Wrapped) -> list[dict[str, Any]]:
    """The parameter groups without their parameters, as JSON values. Raises TypeError for what
    cannot be kept, with its place."""
    return [
        options
        | {
            key: to_plain(value, f"groups[{i}][{key!r}]")
            for key, value in group.items()
            if key not in options and key != "params"
        }
        for i, (options, group) in enumerate(
            zip(_options(state), state.optimizer.param_groups, strict=True)
        )
    ]


def _options(state: Wrapped) -> list[dict[str, Any]]:
    """By parameter group: the options of the optimizer's class, in plain numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.item() if isinstance(value, torch.Tensor) else value

    known = state.optimizer.defaults
    return [
        {key: plain(value) for key, value in group.items() if key in known}
        for group in state.optimizer.param_groups
    ]


def wanted_of(state: Wrapped) -> dict[str, Any]:
    """What a manifest has to fit: see check() of checkpoint_manifest.py."""
    options = list(state.optimizer.defaults)
    return model_layout(state) | {"groups": _options(state), "options": options}


def merged_groups(
    state: Wrapped, saved: list[dict[str, Any]], folder: Path
) -> list[dict[str, Any]]:
    """The hyperparameters to go on with. Raises CheckpointError where they need other moments."""
    optimizer = cast(StrataOptimizer, state.optimizer)
    try:
        groups = [
            merged(g, s, optimizer.defaults) for g, s in zip(_options(state), saved, strict=True)
        ]
        specs = optimizer.group_specs(groups)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the hyperparameters in {folder} do not fit: {error}") from error
    for i, (spec, ours) in enumerate(zip(specs, state.config["groups"], strict=True)):
        if len(moments_of(spec)) > len(moments_of(ours)):
            raise CheckpointError(
                f"groups[{i}] in {folder} needs {len(moments_of(spec))} moments, and the model was "
                f"wrapped with hyperparameters that keep {len(moments_of(ours))}"
            )
    return groups


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def buffer_entries(buffers: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """What a manifest says of each, without places and checksums."""
    return [
        {
            "name": name,
            "shape": list(value.shape),
            "tensors": [
                {
                    "kind": "buffer",
                    "dtype": dtype_name(value.dtype),
                    "bytes": value.numel() * value.itemsize,
                }
            ],
        }
        for name, value in buffers.items()
    ]


def model_layout(state: Wrapped) -> dict[str, Any]:
    """What a manifest says of the model as it is now: "params", "buffers" and "bytes", without
    steps, places and checksums."""

    def records(kinds: Sequence[tuple[str, str, int]]) -> list[Record]:
        return [
            {"kind": kind, "dtype": dtype, "bytes": count * getattr(torch, dtype).itemsize}
            for kind, dtype, count in kinds
        ]

    params = []
    for tensor in stored_tensors(state.model):
        spec = state.config["params"][tensor.parts[0]]
        params.append(
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": spec["dtype"],
                "trainable": spec["trainable"],
                "group": spec["group"],
                "tiles": len(tensor.parts),
                "tensors": records(stored_kinds(state, spec, tensor)),
            }
        )
        if "stored" in spec:
            params[-1]["stored"] = spec["stored"]
    buffers = buffer_entries(persistent_buffers(state.model))
    size = sum(record["bytes"] for entry in [*params, *buffers] for record in entry["tensors"])
    return {"params": params, "buffers": buffers, "bytes": size}
