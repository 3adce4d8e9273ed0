"""The files of an export: how they take the places of an older one's.

    with replace_export(Path("out")) as folder:        # fill it as save_pretrained would
        save_shard(tensors, folder / "model-00001-of-00002.safetensors")
        ...
        write_index(folder, {"wte.weight": "model-00001-of-00002.safetensors", ...}, total_bytes)

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
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .replacing import (
    MARKER_NAME,
    WorkFolder,
    dead_folders,
    remove,
    sync_file,
    sync_folder,
    work_folders,
)
from .weights import INDEX_NAME

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


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file of tensors, with our mark, and waits until it is on the disk."""
    save_file(tensors, path, metadata={"format": "pt", MARK: "1"})
    sync_file(path)


def write_index(folder: Path, files: dict[str, str], size: int) -> None:
    """Names the shard of every tensor."""
    content = {"metadata": {"total_size": size, MARK: "1"}, "weight_map": files}
    temporary = folder / f"{INDEX_NAME}.tmp"
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    sync_file(temporary)
    os.replace(temporary, folder / INDEX_NAME)


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
        sync_folder(path)
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
    sync_folder(path)
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
    sync_folder(path)
    # 4. The final index.
    os.replace(work / INDEX_NAME, path / INDEX_NAME)
    sync_folder(path)


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
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or not all(
        isinstance(index.get(key), dict) for key in ("metadata", "weight_map")
    ):
        return None
    return index
