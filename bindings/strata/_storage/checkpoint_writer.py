"""Writes a checkpoint: by one process, or by all ranks of a run, each of them a part.

    work = Work.of(state, path, extra, progress, together)     # takes what is in no page
    work.join(heard)                                           # what Work.said() was on each rank
    work.write(values)                                         # the folder takes its place

The format is described in saving.py and shards.py; it does not say how many wrote.

Note [One commit]. Each tensor is written whole, by the rank that owns most of it: what others own
of it they lend, page by page (engine/ranks/lender.hpp). So every tensor is in one piece, in a file
that one rank writes, and any reader reads them.
    1. Rank 0 makes the work folder beside the old checkpoint.
    2. Files of the last checkpoint in which nothing has changed are linked.
    3. Each rank writes its shards, and waits until the disk has them. All know what all are going
       to write, and by which name: no two ranks have the same.
    4. When all have, rank 0 writes the one manifest, and the folder takes its place.
Each phase ends for all ranks, or for none (together.py). Up to the end of phase 3 the new folder
has no manifest, and so is no checkpoint: whoever fails or dies, the old one stays.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._core import Hasher
from .._runtime.wrapped import Wrapped
from . import rng
from .checkpoint import Meter, Progress, check_buffers, model_layout, plain_groups, raw_bytes
from .checkpoint_files import CheckpointError, Record, replace_folder, write_manifest
from .extra_state import extra_places, take_extra_state
from .extras import to_json
from .replacing import writing
from .shards import Earlier, Shard, ShardWriter, Wanted, cut, describe, free_name, shape_of
from .stored import StoredTensor, persistent_buffers, stored_tensors
from .together import Together, keeper_of

Values = Callable[[StoredTensor, Record], Iterator[memoryview]]
"""The bytes of a tensor, as the manifest's record of it says."""

Key = tuple[str, str]
"""The name and the kind of a tensor."""

Source = tuple[Wanted, Callable[[], Iterator[memoryview]]]
"""A tensor, and where its bytes come from."""


@dataclass
class Work:
    """A checkpoint to be written, and what is in no page, as it was when it was asked for."""

    path: Path
    earlier: Earlier
    manifest: dict[str, Any]  # without digests; its steps are those that this rank has made
    tensors: list[StoredTensor]
    buffers: list[torch.Tensor]
    meter: Meter
    together: Together
    keepers: dict[str, int]  # by tensor: the rank that writes it

    @staticmethod
    def of(
        state: Wrapped,
        path: Path,
        extra: dict[str, Any] | None,
        progress: Progress | None,
        together: Together,
    ) -> Work:
        """Takes what is in no page. Raises TypeError for what cannot be kept."""
        check_buffers(state.model)
        context = {
            "step": state.steps_before + state.session.steps(),
            "groups": plain_groups(state),
            "extra_state": take_extra_state(extra_places(state.model)),
            "rng": rng.capture(),
            "extra": to_json(extra or {}, None),
        }
        context = json.loads(json.dumps(context))  # raises now, not when all tensors are written
        manifest = model_layout(state) | context
        tensors = stored_tensors(state.model)
        buffers = persistent_buffers(state.model).values()
        return Work(
            path,
            Earlier.find([path, state.last_saved]),
            manifest,
            tensors,
            [value.detach().to("cpu", copy=True) for value in buffers],
            Meter(progress, manifest["bytes"]),
            together,
            {tensor.name: keeper_of(state, tensor.parts) for tensor in tensors},
        )

    def said(self) -> dict[str, Any]:
        """What the others need to know of this rank."""
        return {
            "path": str(self.path),
            "earlier": str(self.earlier.folder),
            "steps": [entry["step"] for entry in self.manifest["params"]],
            "rng": self.manifest["rng"],
            "extra": self.manifest["extra"],
        }

    def join(self, heard: list[dict[str, Any]]) -> None:
        """`heard`: what said() was on each rank. Raises CheckpointError where they write to
        different places."""
        self.together.agree("paths", [said["path"] for said in heard])
        if any(said["earlier"] != heard[0]["earlier"] for said in heard):
            self.earlier = Earlier()  # what has not changed since must be the same for all
        for i, entry in enumerate(self.manifest["params"]):
            entry["step"] = max(said["steps"][i] for said in heard)  # who owns nothing counts none
        if self.together.count > 1:
            kept = ("rng", "extra")
            self.manifest["others"] = [{key: said[key] for key in kept} for said in heard[1:]]

    def write(self, values: Values) -> None:
        """The folder takes its place. REQUIRES: the manifest has steps, of several ranks by join().
        See Note [One commit]."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(writing(self.path, self.manifest["bytes"]))
            with self.together.phase() as phase:
                if self.together.leads:
                    phase.said = str(stack.enter_context(replace_folder(self.path)))
            folder = Path(phase.heard[0])
            sources = self._sources(values)
            with self.together.phase() as phase:
                if not folder.is_dir():
                    raise CheckpointError(
                        f"{self.path} is not on a disk that all machines share: rank 0 has made "
                        f"{folder.name} beside it, and rank {self.together.rank} does not see it"
                    )
                phase.said = _listed(self._link(sources, folder))
            records = _joined(phase.heard)
            names = {record["file"] for record in records.values()}
            left = [wanted for wanted, _ in sources.values() if _key(wanted) not in records]
            with self.together.phase() as phase:
                self.meter.add(_bytes_of(records))
                written = self._write_shards(sources, left, folder, names)
                phase.said = _listed(written)
            records |= (found := _joined(phase.heard))
            with self.together.phase():
                self.meter.add(_bytes_of(found) - _bytes_of(written))
                if self.together.leads:
                    self._write_manifest(folder, records, names)
                    stack.close()

    def _link(self, sources: dict[Key, Source], folder: Path) -> dict[Key, Record]:
        def digest(wanted: Wanted) -> str:
            found = Hasher()
            for chunk in sources[_key(wanted)][1]():
                found.update(chunk)
            return found.hexdigest()

        tensors = [wanted for wanted, _ in sources.values()]
        return self.earlier.link_unchanged(
            tensors, digest, folder, lambda name: self._keeper(name) == self.together.rank
        )

    def _write_shards(
        self,
        sources: dict[Key, Source],
        left: list[Wanted],
        folder: Path,
        names: set[str],
    ) -> dict[Key, Record]:
        """Those of this rank. `names`: of files that are there; those of all ranks are added."""
        records: dict[Key, Record] = {}
        for keeper, shard in self._shards(left):
            name = free_name(shard.stem, names)
            names.add(name)
            if keeper != self.together.rank:
                continue
            with ShardWriter(folder / name, shard) as file:
                for wanted in shard.tensors:
                    chunks = self.meter(sources[_key(wanted)][1]())
                    records[_key(wanted)] = file.write(wanted, chunks)
        return records

    def _shards(self, left: Sequence[Wanted]) -> Iterator[tuple[int, Shard]]:
        """All shards, and the rank that writes each: in the same order on every rank."""
        for rank in range(self.together.count):
            mine = [wanted for wanted in left if self._keeper(wanted.name) == rank]
            for shard in cut(mine, self.earlier.quiet):
                yield rank, shard

    def _keeper(self, name: str) -> int:
        """Buffers are rank 0's."""
        return self.keepers.get(name, 0)

    def _write_manifest(
        self, folder: Path, records: dict[Key, Record], names: Iterable[str]
    ) -> None:
        for entry in (*self.manifest["params"], *self.manifest["buffers"]):
            entry["tensors"] = [records[entry["name"], r["kind"]] for r in entry["tensors"]]
        write_manifest(folder, self.manifest | {"files": describe(folder, names)})

    def _sources(self, values: Values) -> dict[Key, Source]:
        found: dict[Key, Source] = {}
        for tensor, entry in zip(self.tensors, self.manifest["params"], strict=True):
            for record in entry["tensors"]:
                wanted = _wanted(entry, record, entry["trainable"])
                found[_key(wanted)] = (wanted, _of(values, tensor, record))
        for value, entry in zip(self.buffers, self.manifest["buffers"], strict=True):
            wanted = _wanted(entry, entry["tensors"][0], True)
            found[_key(wanted)] = (wanted, _plain(value))
        return found


def _of(values: Values, tensor: StoredTensor, record: Record) -> Callable[[], Iterator[memoryview]]:
    return lambda: values(tensor, record)


def _plain(value: torch.Tensor) -> Callable[[], Iterator[memoryview]]:
    return lambda: raw_bytes(value)


def _key(wanted: Wanted) -> Key:
    return wanted.name, wanted.kind


def _wanted(entry: Record, record: Record, changes: bool) -> Wanted:
    return Wanted(
        entry["name"],
        record["kind"],
        record["dtype"],
        shape_of(entry, record),
        record["bytes"],
        entry.get("step", 0),
        changes,
    )


def _listed(records: dict[Key, Record]) -> list[list[Any]]:
    """As JSON has it."""
    return [[name, kind, record] for (name, kind), record in records.items()]


def _joined(heard: list[list[list[Any]]]) -> dict[Key, Record]:
    """What _listed() was on each rank."""
    found: dict[Key, Record] = {}
    for name, kind, record in (each for said in heard for each in said):
        if (name, kind) in found:
            raise RuntimeError(f"{kind} of {name!r} was written by two ranks")
        found[name, kind] = record
    return found


def _bytes_of(records: dict[Key, Record]) -> int:
    return sum(record["bytes"] for record in records.values())
