"""Shards: the safetensors files of a checkpoint, and which of an earlier one are written again.

    for shard in cut(wanted):                           # of bounded size, what changes by itself
        with ShardWriter(folder / name, shard) as file:
            for tensor in shard.tensors:
                record = file.write(tensor, chunks)
    earlier = Earlier.find([path])                      # the last checkpoint of the series
    records = earlier.link_unchanged(wanted, digest_of, folder, mine)

Format: each shard is a safetensors file: eight bytes with the length of the header, little-endian;
the header, JSON, padded with spaces to a multiple of eight; the tensors, wider elements first.
parameters-00001.safetensors and so on hold parameters and buffers under their names, those of
training in float32; moments-00001.safetensors hold NAME.exp_avg and NAME.exp_avg_sq. What rests as
codes is in the place of NAME: NAME.codes, NAME.scales and, in nf4-double, NAME.scale_groups.

Note [What is not written again]. A shard of an earlier checkpoint is linked into the new one where
all its tensors have made no step since and have the same digests: their values are read, not
written. What is frozen, and experts that saw no token, stay in shards of their own, for cut() keeps
what did not change apart from what did. A shard whose file was touched after its checkpoint was
complete is written again. AdamW changes all that it trains in every step, whatever the gradient.

Nothing here knows models. Pure but for files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint_files import (
    MANIFEST_NAME,
    CheckpointError,
    Record,
    TensorWriter,
    find,
    shard_name,
    write_all,
)
from .manifests import read_checkpoint
from .replacing import sync
from .saved_file import header

SHARD_BYTES = 1 << 30
FORMAT_METADATA = {"format": "pt", "written_by": "strata.save"}
MOMENT_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
CODE_NAMES = {"codes": "codes", "scales": "scales", "groups": "scale_groups"}
KIND_NAMES = MOMENT_NAMES | CODE_NAMES


@dataclass(frozen=True)
class Wanted:
    """A tensor that a checkpoint will have."""

    name: str  # of the parameter or buffer
    kind: str  # master, moment1, moment2, buffer; codes, scales, groups
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    step: int  # updates that it has had
    changes: bool  # trained, or a buffer

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name}.{KIND_NAMES[self.kind]}" if self.kind in KIND_NAMES else self.name


@dataclass(frozen=True)
class Shard:
    """Tensors of one file, in its order."""

    stem: str  # "parameters", "moments"
    tensors: tuple[Wanted, ...]


def shape_of(entry: Record, record: Record) -> tuple[int, ...]:
    """Of a tensor in its file. `entry`: what a manifest says of the parameter or buffer."""
    if record["kind"] not in CODE_NAMES:
        return tuple(entry["shape"])
    return (record["bytes"] // getattr(torch, record["dtype"]).itemsize,)


def cut(wanted: Sequence[Wanted], quiet: Callable[[Wanted], bool]) -> Iterator[Shard]:
    """All of them in shards. `quiet`: it has not changed since the last checkpoint."""
    for stem in ("parameters", "moments"):
        mine = [t for t in wanted if (t.kind in MOMENT_NAMES) == (stem == "moments")]
        for age in (0, 1, 2):  # frozen; trained, and unchanged; changed
            found = [t for t in mine if age == (2 - quiet(t) if t.changes else 0)]
            shard: list[Wanted] = []
            for tensor in found:
                if shard and sum(t.bytes for t in shard) + tensor.bytes > SHARD_BYTES:
                    yield _shard(stem, shard)
                    shard = []
                shard.append(tensor)
            if shard:
                yield _shard(stem, shard)


def _shard(stem: str, tensors: list[Wanted]) -> Shard:
    return Shard(stem, tuple(sorted(tensors, key=lambda t: -getattr(torch, t.dtype).itemsize)))


def free_name(stem: str, taken: Collection[str]) -> str:
    """The next name of a shard that is not `taken`."""
    numbers = (shard_name(stem, n) for n in range(1, len(taken) + 2))
    return next(name for name in numbers if name not in taken)


class ShardWriter(TensorWriter):
    """Writes one front to back, and syncs it to the disk on leaving."""

    def __init__(self, path: Path, shard: Shard) -> None:
        """Creates the file, which has a name of shard_name()."""
        self.name = path.name
        super().__init__(path)
        tensors = {
            t.key: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta")
            for t in shard.tensors
        }
        head = header(tensors, list(tensors), FORMAT_METADATA)
        write_all(self._file, memoryview(head))
        self.bytes = len(head)

    def write(self, tensor: Wanted, chunks: Iterable[memoryview]) -> Record:
        """Writes the next tensor of the shard, and returns what the manifest says about it."""
        record = self.append(tensor.kind, tensor.dtype, _up_to(tensor, chunks))
        if record["bytes"] != tensor.bytes:
            raise RuntimeError(
                f"{tensor.key} came with {record['bytes']} bytes, and has {tensor.bytes}"
            )
        return record | {"file": self.name}


def _up_to(tensor: Wanted, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Raises RuntimeError ahead of the first byte that is not the tensor's."""
    left = tensor.bytes
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise RuntimeError(f"{tensor.key} came with more than its {tensor.bytes} bytes")
        yield chunk


class Earlier:
    """The last checkpoint of a series. Without one, nothing is unchanged."""

    def __init__(self, folder: Path | None = None, manifest: Record | None = None) -> None:
        """`manifest`: of the folder, which is complete."""
        self.folder = folder
        self._steps: dict[str, int] = {}
        self._records: dict[tuple[str, str], tuple[Record, list[int]]] = {}
        entries = [] if manifest is None else [*manifest["params"], *manifest["buffers"]]
        for entry in entries:
            self._steps[entry["name"]] = entry.get("step", 0)
            for record in entry["tensors"]:
                shape = list(shape_of(entry, record))
                self._records[entry["name"], record["kind"]] = (record, shape)

    @staticmethod
    def find(paths: Iterable[Path | None]) -> Earlier:
        """The first that is a complete checkpoint."""
        for path in paths:
            folder = None if path is None else find(path)
            if folder is None:
                continue
            with contextlib.suppress(CheckpointError):
                return Earlier(folder, read_checkpoint(folder))
        return Earlier()

    def quiet(self, tensor: Wanted) -> bool:
        """Whether a tensor of the same form is there, and no step has been made since."""
        found = self._records.get((tensor.name, tensor.kind))
        if found is None or tensor.kind == "buffer":
            return False
        record, shape = found
        same = record["dtype"] == tensor.dtype and list(shape) == list(tensor.shape)
        return same and self._steps[tensor.name] == tensor.step

    def link_unchanged(
        self,
        wanted: Sequence[Wanted],
        digest: Callable[[Wanted], str],
        into: Path,
        mine: Callable[[str], bool],
    ) -> dict[tuple[str, str], Record]:
        """Links the files whose tensors are all among those wanted and unchanged. Returns what the
        manifest says about these tensors. `mine`: whether this rank looks after the files whose
        first tensor has that name. See Note [What is not written again]."""
        if self.folder is None:
            return {}
        by_key = {(t.name, t.kind): t for t in wanted}
        files: dict[str, list[tuple[str, str]]] = {}
        for key, (record, _) in self._records.items():
            files.setdefault(record["file"], []).append(key)
        found: dict[tuple[str, str], Record] = {}
        for name, keys in sorted(files.items()):
            if not mine(keys[0][0]):
                continue
            if not all(key in by_key and self.quiet(by_key[key]) for key in keys):
                continue
            if not self._untouched(name):
                continue
            if all(digest(by_key[key]) == self._records[key][0]["xxh3_64"] for key in keys):
                with contextlib.suppress(OSError):  # no links here, or another file system
                    os.link(self.folder / name, into / name)
                    found |= {key: self._records[key][0] for key in keys}
        if found:
            sync(into)
        return found

    def _untouched(self, name: str) -> bool:
        assert self.folder is not None
        try:
            complete = (self.folder / MANIFEST_NAME).stat().st_mtime_ns
            return (self.folder / name).stat().st_mtime_ns <= complete
        except OSError:
            return False


def describe(folder: Path, names: Iterable[str]) -> list[dict[str, object]]:
    """The manifest's "files"."""
    return [{"file": n, "bytes": (folder / n).stat().st_size} for n in sorted(names)]
