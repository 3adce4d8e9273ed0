"""Writes a wrapped model in the layout of `save_pretrained`, one tensor in memory at a time.

    strata.export_safetensors(model, "out/")
    AutoModelForCausalLM.from_pretrained("out/")

Files: model.safetensors, or model-00001-of-000NN.safetensors with model.safetensors.index.json as
Transformers reads them; config.json and generation_config.json where the model has them. What is in
them: exported.py.

Note [One index at a time]. Shards of the old and the new export often have the same names, and
whoever loads the folder believes its index. So the new files are written into a work folder inside
`out`, and then
    1. an index appears that names the shards in the work folder: the new export is there;
    2. the old shards go;
    3. the new ones get their final names, as a second link to the same bytes;
    4. the final index appears, and the work folder goes.
Killed at any moment, the folder loads as the old export or as the new one, never as both. On file
systems without hard links the index is away between 2 and 4, and the folder does not load at all.
A single file needs no index: it takes the old one's place, and the old index goes.

Only files that carry our mark are ever replaced or removed. Configuration files carry none: they
are ours where weights with our mark lie beside them, so they take their places behind these.
"""

import contextlib
import copy
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .._config.managed import DTYPE_NAMES, is_of_peft
from .._config.paths import AnyPath, as_path
from .._runtime.wrapped import Wrapped, wrapped
from .exported import exported
from .replacing import (
    MARKER_NAME,
    WorkFolder,
    dead_folders,
    remove,
    remove_unmarked,
    sync,
    work_folders,
    write_whole,
    writing,
)
from .saved_file import stream_file
from .stored import base_model
from .weights import INDEX_NAME

SHARD_BYTES = 256 << 20


def export_safetensors(
    model: nn.Module,
    path: AnyPath,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
) -> None:
    """Writes the newest parameters of a wrapped model, as save_pretrained() would. The model stays
    as it is.

    Memory used: that of the largest parameter; some times that where the file has it in parts (the
    experts of a layer), and with `merge` some times the layer with most parameters. An earlier
    export in `path` is replaced, and loads until the new one does, so the disk holds both for a
    while. Other files there stay.

    Args:
        model: a wrapped model. Of one with adapters of PEFT, the adapters' files are written.
        path: a folder, which is made where there is none.
        dtype: of the files. Default: that of the computation. Adapters are merged in it; their own
            files have no other than theirs.
        shard_bytes: of a file at most, unless one tensor has more.
        merge: of a model with adapters, writes the model inside with the adapters merged into it,
            as merge_and_unload() gives it.

    Raises:
        FileExistsError: `path` holds weights, or config files, that strata did not export.
        OSError: it cannot be written.
        ValueError: the model is not wrapped, `merge` without adapters or with some that PEFT cannot
            merge, or `dtype` for adapters alone.
        RuntimeError: between backward() and step() of update="in_backward".
        StrataError: a page could not be read.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> model, _ = strata.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> strata.export_safetensors(model, "out")
        >>> strata.export_safetensors(model, "out-bfloat16", dtype=torch.bfloat16)
    """
    state = _settled(model)
    if merge and not has_adapters(model):
        raise ValueError(f"this {type(model).__name__} has no adapters of PEFT to merge")
    if has_adapters(model) and not merge:
        if dtype is not None:
            raise ValueError(f"adapters are written as they are computed with, not as {dtype}")
        with writing(as_path(path)):
            cast(Any, model).save_pretrained(str(as_path(path)))
        return
    tensors = exported(state, dtype, merge)
    shards = list(_shards({name: t.nbytes for name, t in tensors.items()}, shard_bytes))
    files: dict[str, str] = {}
    size = sum(t.nbytes for t in tensors.values())
    with writing(as_path(path), size), replace_export(as_path(path)) as folder:
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            file = SINGLE_NAME if len(shards) == 1 else file
            save_shard({name: tensors[name] for name in names}, folder / file)
            files |= dict.fromkeys(names, file)
        _save_configs(base_model(model), folder, tensors)
        if len(shards) > 1:
            write_index(folder, files, size)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT made it what it is: its own save_pretrained() writes the adapters alone."""
    made = is_of_peft(model) and hasattr(model, "peft_config")
    return made or getattr(model, "_hf_peft_config_loaded", False)


def _settled(model: nn.Module) -> Wrapped:
    """The state of a wrapped model whose parameters can be read."""
    state = wrapped(model)
    state.check_parameters()
    state.hooks.reset()
    state.refuse_half_step("export_safetensors()")
    state.synchronize()
    return state


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


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype of most bytes of parameters: what config.json says of the whole."""
    bytes_of: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in DTYPE_NAMES:
            bytes_of[tensor.dtype] += tensor.nbytes
    return max(bytes_of, key=lambda dtype: bytes_of[dtype])


def _save_configs(model: nn.Module, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """What Transformers needs to build the model again; nothing for other models."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    config.dtype = _common_dtype(tensors.values())
    if any(name in tensors for name in getattr(model, "all_tied_weights_keys", None) or ()):
        config.tie_word_embeddings = False  # PEFT has trained one of the two
    config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(path)


SINGLE_NAME = "model.safetensors"
CONFIG_NAMES = ("config.json", "generation_config.json")
TARGET = "export"
MARK = "strata_export"  # in the metadata of shards and index
SHARD = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@contextlib.contextmanager
def replace_export(path: Path) -> Iterator[Path]:
    """Gives a folder to fill, whose files then take their places in `path`.

    Raises FileExistsError, at once, where they would take the places of files that are not ours.
    """
    path = Path(os.path.realpath(path))
    path.mkdir(parents=True, exist_ok=True)
    refuse_others(path)
    with WorkFolder(path, TARGET) as work:
        try:
            yield work.path
            _place(work.path, path)
        finally:
            _clear(work.path, path)
    for left in dead_folders(path, TARGET):
        _clear(left, path)
    remove_unmarked(path, TARGET)


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file of tensors, with our mark, and waits until it is on the disk."""
    stream_file(tensors, path, {"format": "pt", MARK: "1"})
    sync(path)


def write_index(folder: Path, files: dict[str, str], size: int) -> None:
    """Names the shard of every tensor."""
    content = {"metadata": {"total_size": size, MARK: "1"}, "weight_map": files}
    write_whole(folder / INDEX_NAME, json.dumps(content, indent=2) + "\n")


def _place(work: Path, path: Path) -> None:
    """See Note [One index at a time]."""
    index = _read_index(work)
    shards = sorted(set(index["weight_map"].values())) if index else [SINGLE_NAME]
    others = [
        entry
        for entry in work.iterdir()
        if entry.is_file() and entry.name not in {*shards, INDEX_NAME, MARKER_NAME}
    ]
    if index is None:
        os.replace(work / SINGLE_NAME, path / SINGLE_NAME)
        _move(others, path)
        sync(path)
        (path / INDEX_NAME).unlink(missing_ok=True)
        _remove_shards(path, keep=SINGLE_NAME)
        return
    # 1. The work folder is the export.
    inside = {name: f"{work.name}/{file}" for name, file in index["weight_map"].items()}
    staged = work / "staged"
    staged.mkdir()
    write_index(staged, inside, index["metadata"]["total_size"])
    os.replace(staged / INDEX_NAME, path / INDEX_NAME)
    _move(others, path)
    sync(path)
    # 2. The old shards go.
    _remove_shards(path)
    # 3. Final names.
    try:
        for file in shards:
            os.link(work / file, path / file)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        (path / INDEX_NAME).unlink()  # no hard links here
        for file in shards:
            os.replace(work / file, path / file)
    sync(path)
    # 4. The final index.
    os.replace(work / INDEX_NAME, path / INDEX_NAME)
    sync(path)


def _move(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        os.replace(file, folder / file.name)


def _clear(work: Path, path: Path) -> None:
    """Removes a work folder, unless it is the export now."""
    index = _read_index(path)
    used = set(index["weight_map"].values()) if index else set()
    if not any(file.startswith(f"{work.name}/") for file in used):
        remove(work)


def _remove_shards(path: Path, keep: str = "") -> None:
    for file in path.iterdir():
        if SHARD.fullmatch(file.name) and file.name != keep and _is_ours(file):
            file.unlink()


def refuse_others(path: Path, others: Iterable[str] = ()) -> None:
    """Raises FileExistsError where an export into `path` would take the places of files that are
    not ours, or where loaders would take another's files for ours. `others`: names of further files
    that the caller will write there."""
    files = sorted(path.iterdir()) if path.is_dir() else []
    weights = [file for file in files if _is_weights(file)]
    for file in weights:
        if not _is_ours(file):
            raise FileExistsError(
                f"{file} was not written by strata.export_safetensors: move it away, or export to "
                "another folder"
            )
    if weights or work_folders(path, TARGET):
        return
    for file in files:
        if file.name in {*CONFIG_NAMES, *others}:
            raise FileExistsError(
                f"{file} belongs to no export of strata, and would be replaced: move it away, or "
                "export to another folder"
            )


def remove_export(path: Path, others: Iterable[str] = ()) -> None:
    """Removes an export and the files called `others` beside it, and nothing where there is none.

    The weights go last: killed before, the rest is still known to belong to an export.
    Raises FileExistsError, and removes nothing, where there are weights that are not ours.
    """
    path = Path(os.path.realpath(path))
    refuse_others(path)
    weights = [file for file in path.iterdir() if _is_weights(file)] if path.is_dir() else []
    if weights:
        for name in (*CONFIG_NAMES, *others):
            (path / name).unlink(missing_ok=True)
    for file in sorted(weights, key=lambda file: file.name != INDEX_NAME):
        file.unlink()
    for left in dead_folders(path, TARGET):
        remove(left)
    remove_unmarked(path, TARGET)


def _is_weights(file: Path) -> bool:
    return file.name == INDEX_NAME or SHARD.fullmatch(file.name) is not None


def _is_ours(file: Path) -> bool:
    """Whether a shard or an index carries our mark."""
    if file.name == INDEX_NAME:
        index = _read_index(file.parent)
        return index is not None and MARK in index["metadata"]
    try:
        with safe_open(file, framework="pt") as opened:
            return MARK in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _read_index(folder: Path) -> dict[str, Any] | None:
    """What the index says; None where there is none that can be read."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(index, dict) or not all(
        isinstance(index.get(key), dict) for key in ("metadata", "weight_map")
    ):
        return None
    return index
