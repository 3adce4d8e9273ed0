"""Parts of a snapshot: what each rank but the first tells rank 0, in files of the folder that is
being made. They are gone before it takes its place.

    write_part(folder, rank, pages, context)           # of rank 1, 2, ...
    board.send(name, part_files(folder, rank)[0])      # from where rank 0 does not see it
    manifest["others"].append(join_part(folder, rank, manifest, file))         # by rank 0

    part-1.jsonl   {"steps": by parameter, "rng", "extra", "tensors": as in a manifest}, then a line
                   for each chunk that the rank owns: [number, chunk]
    part-1.bin     tensors of its `extra`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint_files import BUFFER_BYTES, Record, TensorWriter, give_way
from .context import Context, note_steps, own_chunks, write_tensors

if TYPE_CHECKING:
    from ..._core import TakenSnapshot


def write_part(folder: Path, rank: int, pages: TakenSnapshot, context: Context) -> None:
    """What this rank has of a snapshot."""
    header: dict[str, Any] = {"steps": pages.param_steps}
    header |= {key: context.manifest[key] for key in ("rng", "extra")}
    with TensorWriter(_tensors(folder, rank)) as tensors:
        header["tensors"] = write_tensors(tensors, context)
    with _lines(folder, rank).open("w") as file:
        file.write(f"{json.dumps(header)}\n")
        for numbered in own_chunks(pages):
            file.write(f"{json.dumps(numbered)}\n")


def read_part(folder: Path, rank: int) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """The first line, and the chunks with their numbers."""
    chunks = []
    with _lines(folder, rank).open() as file:
        header = json.loads(file.readline())
        for line in file:
            number, chunk = json.loads(line)
            chunks.append((number, chunk | {"rank": rank}))
            give_way()
    return header, chunks


def join_part(
    folder: Path, rank: int, manifest: dict[str, Any], state: TensorWriter
) -> dict[str, Any]:
    """Its chunks and steps go to the manifest, its tensors to `state`. Returns what the manifest
    says of the rank. The part's files are gone then."""
    header, chunks = read_part(folder, rank)
    for number, chunk in chunks:
        manifest["chunks"][number] = chunk
    note_steps(manifest, header["steps"])
    own = {key: header[key] for key in ("rng", "extra")}
    with _tensors(folder, rank).open("rb") as file:
        own["tensors"] = [
            state.append("extra", record["dtype"], _bytes(file, record))
            | {"shape": record["shape"]}
            for record in header["tensors"]
        ]
    remove_part(folder, rank)
    return own


def part_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Those of a part."""
    return _lines(folder, rank), _tensors(folder, rank)


def remove_part(folder: Path, rank: int) -> None:
    """Its files, as far as they are there."""
    for path in part_files(folder, rank):
        path.unlink(missing_ok=True)


def _bytes(file: Any, record: Record) -> Iterator[memoryview]:
    file.seek(record["offset"])
    left = record["bytes"]
    while left:
        raw = file.read(min(left, BUFFER_BYTES))
        left -= len(raw)
        yield memoryview(raw)


def _lines(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.jsonl"


def _tensors(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.bin"
