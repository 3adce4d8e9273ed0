"""The table of what manifests hold, and how they are read; saving.py and snapshots/format.py say
what it means.

    manifest = read_checkpoint(folder)           # raises CheckpointError with the key that is wrong
    layout = read_layout(folder)                 # of a checkpoint or a snapshot

A manifest with a right checksum may still be another program's, or that of a bug. What a manifest
must say beside its types is held against the files and the model by checkpoint_manifest.py and
snapshots/check.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from .._config.choices import DTYPES, FORMS
from .._schema import Between, Count, Digest, Form, FormError, Matches, Positive, Steps
from .checkpoint_files import SHARD_NAME, CheckpointError, read_manifest

RULES = ("adamw", "adam", "sgd", "lion", "adagrad", "foreign")
MOMENT_DTYPES = ("float32", "bfloat16", "block8")


def _one_of(choices: tuple[str, ...]) -> Matches:
    return Matches("|".join(choices), f"one of {', '.join(choices)}")


Json = dict[str, Any]
Word = Annotated[int, Between(0, (1 << 64) - 1)]
FileName = Annotated[str, Matches(SHARD_NAME.pattern, "the name of a file of a checkpoint")]


class Tensor(TypedDict):
    kind: str
    dtype: str


class Record(Tensor):
    """A tensor in a file."""

    offset: Count
    bytes: Count
    xxh3_64: Digest


class FileRecord(Record):
    file: FileName


class ShapedRecord(Record):
    shape: list[Count]


class Param(TypedDict):
    name: str
    shape: list[Count]
    dtype: Annotated[str, _one_of(DTYPES)]
    trainable: bool
    group: Count
    step: Steps
    tiles: Positive
    stored: NotRequired[Annotated[str, _one_of(FORMS)]]


class Layout(TypedDict):
    params: list[Param]


class Rng(TypedDict):
    """As rng.py has it."""

    torch: str
    cuda: list[str]
    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]


class Context(TypedDict):
    """What each rank has of its own."""

    rng: Rng
    extra: Json


class Common(Context):
    bytes: Count
    step: Steps
    groups: list[Json]
    extra_state: Json


# Checkpoints --------------------------------------------------------------------------------------


class FileParam(Param):
    tensors: Annotated[list[FileRecord], Between(1)]


class FileBuffer(TypedDict):
    name: str
    shape: list[Count]
    tensors: tuple[FileRecord]


class File(TypedDict):
    file: FileName
    bytes: Count


class Checkpoint(Common):
    files: list[File]
    params: list[FileParam]
    buffers: list[FileBuffer]
    others: NotRequired[list[Context]]


# Snapshots ----------------------------------------------------------------------------------------

Page = Annotated[list[Word], Between(3, 4)]
"""Slot, version, checksum; and how many bytes it has, where that is not all of the page."""
Role = tuple[Positive, Count, list[Page | None]]
Run = tuple[Count, Count, Positive, Count, Steps]


class PagedParam(Param):
    tensors: Annotated[list[Tensor], Between(1)]
    rule: Annotated[str, _one_of(RULES)]


class PagedBuffer(TypedDict):
    name: str
    shape: list[Count]
    tensors: tuple[Record]


class Chunk(TypedDict):
    runs: list[Run]
    param: Role
    residual: Role | None
    exp_avg: Role | None
    exp_avg_sq: Role | None
    scales: list[Count]
    scale_page: Page | None
    rank: NotRequired[Count]


class RankContext(Context):
    tensors: list[ShapedRecord]


class Drive(TypedDict):
    folder: str
    file: str


class Places(TypedDict):
    """Where the pages of a snapshot are."""

    id: Digest
    drives: Annotated[list[Drive], Between(1)]
    ranks: NotRequired[list[Positive]]


class Snapshot(Common, Places):
    snapshot: int
    time: Count
    page_bytes: Positive
    moment_dtype: Annotated[str, _one_of(MOMENT_DTYPES)]
    params: list[PagedParam]
    parts: list[tuple[Count, Count]]
    chunks: list[Chunk]
    buffers: list[PagedBuffer]
    tensors: list[ShapedRecord]
    others: NotRequired[list[RankContext]]


CHECKPOINT, SNAPSHOT = Form(Checkpoint), Form(Snapshot)
PLACES, LAYOUT = Form(Places), Form(Layout)


def read_checkpoint(folder: Path) -> Json:
    """Raises CheckpointError."""
    return sound(CHECKPOINT, read_manifest(folder), f"{folder} is a damaged checkpoint")


def read_layout(folder: Path) -> Json:
    """What a checkpoint or a snapshot says of its model. Raises CheckpointError."""
    return sound(LAYOUT, read_manifest(folder), f"{folder} is a damaged checkpoint")


def sound(form: Form[Any], manifest: Json, what: str) -> Json:
    """The manifest, if it has this form. Else raises CheckpointError, which begins with `what`."""
    with damaged(what):
        found: Json = form.read(manifest)
        return found


@contextlib.contextmanager
def damaged(what: str) -> Iterator[None]:
    """CheckpointError, which begins with `what`, takes the place of FormError."""
    try:
        yield
    except FormError as error:
        raise CheckpointError(f"{what}: {error}") from error
