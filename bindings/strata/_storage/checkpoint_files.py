"""The files of a checkpoint: tensors with checksums, a manifest, a folder that is whole or absent.

    with replace_folder(Path("checkpoint")) as folder:         # takes its place at the end
        with TensorWriter(folder / name) as file:
            record = file.append("master", "float32", chunks)
        write_manifest(folder, {"files": [{"file": name, "bytes": file.bytes}], ...})

    with TensorReader(find(Path("checkpoint")), {name: size}) as file:
        for chunk in file.chunks(record): ...

What is in the files is described in saving.py and snapshots/format.py. Nothing here knows models.
Use from one thread.

Note [Complete or absent]. All files are written into a work folder beside `path` (replacing.py),
into `path.strata-RANDOM/new`, the manifest last, and synced to the disk; then an older checkpoint
steps aside to `path.strata-RANDOM/old`, the new one takes its name, and the work folder is deleted.
A folder with a manifest is thus always whole. Killed between the two renames, `path` is missing
while both others are whole: a loader then takes the newer. What a killed process left is deleted by
the next save to the same `path`.
"""

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from .._config.paths import AnyPath, as_path
from .._core import Hasher
from .._schema import parsed
from .replacing import (
    WorkFolder,
    dead_folders,
    is_mount_point,
    make_folder,
    remove,
    remove_unmarked,
    sync,
    work_folders,
    write_whole,
)

VERSION = 2  # of checkpoints; snapshots have one of their own
BUFFER_BYTES = 4 << 20
STATE_NAME = "state.bin"  # of snapshots
MANIFEST_NAME = "manifest.json"
FILE_NAMES = frozenset({STATE_NAME, MANIFEST_NAME, f"{MANIFEST_NAME}.tmp"})
ENCODED_AT_ONCE = 64  # entries of a list: less than a millisecond
SHARD_NAME = re.compile(r"(parameters|moments)-\d{5,7}\.safetensors")
NEW_NAME, OLD_NAME = "new", "old"  # in a work folder: what will be, and what was

log = logging.getLogger("strata")

Record = dict[str, Any]
"""Of one tensor: kind, dtype, offset, bytes, xxh3_64."""


def shard_name(stem: str, number: int) -> str:
    """Of a safetensors file of a checkpoint."""
    return f"{stem}-{number:05d}.safetensors"


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint has this name."""
    return name in FILE_NAMES or SHARD_NAME.fullmatch(name) is not None


def write_all(file: BinaryIO, chunk: memoryview) -> None:
    """Writes all of it. A write may be short, and says so only by its result."""
    written = 0
    while written < len(chunk):
        written += file.write(chunk[written:])


class CheckpointError(RuntimeError):
    """A checkpoint is absent, damaged, or of another model; the message says which and where."""


class TensorWriter:
    """Writes a file front to back and syncs it to the disk on leaving."""

    def __init__(self, path: Path) -> None:
        """Creates `path`. Raises OSError where it is there: it may be a link of another's."""
        self.bytes = 0
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def append(self, kind: str, dtype: str, chunks: Iterable[memoryview]) -> Record:
        """Writes one tensor, piece by piece, and returns what the manifest says about it."""
        offset, digest = self.bytes, Hasher()
        for chunk in chunks:
            digest.update(chunk)
            write_all(self._file, chunk)
            self.bytes += len(chunk)
        return {
            "kind": kind,
            "dtype": dtype,
            "offset": offset,
            "bytes": self.bytes - offset,
            "xxh3_64": digest.hexdigest(),
        }

    def __exit__(self, kind: object, *rest: object) -> None:
        """Syncs, unless an exception is on its way, and closes."""
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class TensorReader(contextlib.AbstractContextManager["TensorReader"]):
    """Reads the tensors of a checkpoint, in any order, through one buffer."""

    def __init__(
        self, folder: Path, sizes: Mapping[str, int], buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """Opens files of a folder that `find` returned. `sizes`: of each, as the manifest says.
        Raises CheckpointError for another size."""
        self.folder = folder
        self._buffer = bytearray(buffer_bytes)
        self._files: dict[str, BinaryIO] = {}
        try:
            for name, size in sizes.items():
                self._open(name, size)
        except BaseException:
            self.__exit__()
            raise

    def _open(self, name: str, size: int) -> None:
        path = self.folder / name
        try:
            self._files[name] = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        found = os.fstat(self._files[name].fileno()).st_size
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, its manifest says {size}")

    def chunks(
        self, record: Record, first: int = 0, count: int | None = None
    ) -> Iterator[memoryview]:
        """The bytes of one tensor, or so many of them from its byte `first` on. A chunk is valid
        until the next one is asked for. Raises CheckpointError for bytes that are not the tensor's.
        """
        name = record.get("file", STATE_NAME)
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder} is damaged: it has no {name!r:.60}")
        left = record["bytes"] - first if count is None else count
        if not 0 <= first <= first + left <= record["bytes"]:
            raise CheckpointError(
                f"bytes {first} to {first + left} of a tensor in {self.folder / name} are asked "
                f"for, and it has {record['bytes']}"
            )
        file.seek(record["offset"] + first)
        while left:
            view = memoryview(self._buffer)[: min(left, len(self._buffer))]
            filled = 0
            while filled < len(view):
                count = file.readinto(view[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.folder / name} became shorter")
                filled += count
            left -= filled
            yield view

    def verify(self, records: Iterable[tuple[str, Record]], done: Callable[[int], None]) -> None:
        """Compares every checksum. `records` are tensors with a name for the error."""
        for name, record in records:
            digest = Hasher()
            for chunk in self.chunks(record):
                digest.update(chunk)
                done(len(chunk))
            if digest.hexdigest() != record["xxh3_64"]:
                path = self.folder / record.get("file", STATE_NAME)
                raise CheckpointError(
                    f"{record['kind']} of {name!r} in {path} (byte {record['offset']} on) is "
                    f"damaged: checksum {digest.hexdigest()}, the manifest says "
                    f"{record['xxh3_64']}"
                )

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a folder whose other files are on the disk. It appears whole. Other
    threads get their turn meanwhile: what grows with the model takes a while."""
    manifest = ({} if "snapshot" in manifest else {"version": VERSION}) | manifest
    digest = Hasher()
    for piece in _encoded(dict(sorted(manifest.items())), sort_keys=True):
        digest.update(piece.encode())
    whole = {"checksum": digest.hexdigest()} | manifest
    write_whole(folder / MANIFEST_NAME, "".join(_encoded(whole, sort_keys=False)))
    sync(folder)


def _encoded(manifest: dict[str, Any], sort_keys: bool) -> Iterator[str]:
    """Its JSON. `sort_keys`: of what is inside, as _checksum() has it."""
    for i, (key, value) in enumerate(manifest.items()):
        yield f"{', ' if i else '{'}{json.dumps(key)}: "
        if not isinstance(value, list) or len(value) <= ENCODED_AT_ONCE:
            yield json.dumps(value, sort_keys=sort_keys)
            continue
        for first in range(0, len(value), ENCODED_AT_ONCE):
            part = json.dumps(value[first : first + ENCODED_AT_ONCE], sort_keys=sort_keys)
            yield f"{', ' if first else '['}{part[1:-1]}"
            give_way()
        yield "]"
    yield "}"


def give_way() -> None:
    """Lets another thread have the interpreter that asks for it, sooner than it would."""
    time.sleep(0)


def read_manifest(folder: Path, name: str = MANIFEST_NAME) -> dict[str, Any]:
    """The manifest. Raises CheckpointError where it is damaged or of another version."""
    path = folder / name
    try:
        manifest = parsed(path.read_bytes())
        checksum = manifest.pop("checksum", None) if isinstance(manifest, dict) else None
        found = _checksum(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error!s:.300}") from error
    if checksum is None or "bytes" not in manifest:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint")
    if "snapshot" not in manifest and manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')!r:.20}; this strata reads {VERSION}"
        )
    if checksum != found:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return manifest


def _checksum(manifest: Any) -> str:
    digest = Hasher()
    digest.update(json.dumps(manifest, sort_keys=True).encode())
    return digest.hexdigest()


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds the files of a checkpoint, damaged or not."""
    if not (folder / MANIFEST_NAME).is_file():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return STATE_NAME in names or any(map(SHARD_NAME.fullmatch, names))


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which then takes the place of `path` in one step.

    A link stays, and what it points to is replaced. Files in the old folder that are not a
    checkpoint's move on into the new one. Raises CheckpointError, at once, where `path` cannot be
    replaced. REQUIRES: the caller ends by write_manifest. On an exception `path` stays as it was.
    """
    path = Path(os.path.realpath(path))
    check_replaceable(path)
    make_folder(path.parent)
    with WorkFolder(path.parent, path.name) as work:
        try:
            new = work.path / NEW_NAME
            new.mkdir()
            yield new
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, work.path / OLD_NAME)
            os.rename(new, path)
            sync(path.parent)
        finally:
            _clear(work.path, path)
    tidy(path)


def tidy(path: Path, is_dead: Callable[[Path], bool] = lambda _: False) -> None:
    """Removes what killed processes left beside `path`, and puts back what they had put aside.
    `is_dead`: as dead_folders() has it."""
    for left in dead_folders(path.parent, path.name, is_dead):
        _clear(left, path)
    remove_unmarked(path.parent, path.name)


def complete_at(path: Path) -> Path | None:
    """The folder of what is complete at `path`, or was there when its process was killed while
    something took its place; None: nothing is."""
    if (path / MANIFEST_NAME).is_file():
        return path
    if path.exists():
        return None
    return _newest(work / OLD_NAME for work in work_folders(path.parent, path.name))


def find(path: AnyPath) -> Path | None:
    """The folder to load when asked for `path`, or None where there is no complete checkpoint."""
    path = Path(os.path.realpath(as_path(path)))
    if (path / MANIFEST_NAME).is_file():
        return path
    works = work_folders(path.parent, path.name)
    return _newest(work / name for work in works for name in (NEW_NAME, OLD_NAME))


def _newest(folders: Iterable[Path]) -> Path | None:
    """Of those that are whole."""
    whole = [folder for folder in folders if (folder / MANIFEST_NAME).is_file()]
    return max(whole, key=lambda p: (p / MANIFEST_NAME).stat().st_mtime_ns, default=None)


def remove_checkpoint(path: Path) -> None:
    """Removes the checkpoint at `path`, and those beside it that killed savers left: their files,
    and no others. The folder stays. The manifest goes first, so none is there in part."""
    path = Path(os.path.realpath(path))
    for left in dead_folders(path.parent, path.name):
        for name in (NEW_NAME, OLD_NAME):
            _remove_files(left / name)
        _clear(left, path)
    remove_unmarked(path.parent, path.name)
    _remove_files(path)


def _remove_files(folder: Path) -> None:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    for name in sorted(filter(is_ours, names), key=lambda name: name != MANIFEST_NAME):
        (folder / name).unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raises CheckpointError where a checkpoint cannot take the place of what is at `path`."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder: give another path")
    if is_mount_point(path):
        raise CheckpointError(
            f"something is mounted on {path}, which cannot be replaced in one step: give a folder "
            f"in it, such as {path / 'checkpoint'}"
        )
    if path.samefile(os.curdir):
        raise CheckpointError(
            f"{path} is the working directory, which would be gone when it is replaced: give a "
            f"folder in it, such as {path / 'checkpoint'}"
        )
    if not is_checkpoint(path) and any(path.iterdir()):
        raise CheckpointError(f"{path} exists and is not a checkpoint; not replacing it")


def _clear(work: Path, path: Path) -> None:
    """Removes a work folder, but nothing in it that is needed or not ours."""
    old = work / OLD_NAME
    if old.is_dir():
        if not path.exists():
            os.rename(old, path)  # nothing took its place
        else:
            for entry in old.iterdir():
                if is_ours(entry.name):
                    continue
                if (path / entry.name).exists():
                    log.warning("%s stays: %s has a file of that name", entry, path)
                    return
                os.rename(entry, path / entry.name)
    remove(work)
