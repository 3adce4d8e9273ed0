"""The files of a checkpoint: tensors with checksums, a manifest, a folder that is whole or absent.

    with replace_folder(Path("checkpoint")) as folder:         # takes its place at the end
        with TensorWriter(folder / STATE_NAME) as state:
            record = state.append("master", "float32", chunks)
        write_manifest(folder, {"bytes": state.bytes, ...})

    with TensorReader(find(Path("checkpoint"))) as state:
        for chunk in state.chunks(record): ...

The format is described in checkpoint.py. Nothing here knows models. Use from one thread.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

VERSION = 1
BUFFER_BYTES = 4 << 20
STATE_NAME = "state.bin"
MANIFEST_NAME = "manifest.json"

Record = dict[str, Any]
"""Of one tensor: kind, dtype, offset, bytes, xxh3_64."""


class CheckpointError(RuntimeError):
    """A checkpoint is absent, damaged, or of another model; the message says which and where."""


class TensorWriter(contextlib.AbstractContextManager["TensorWriter"]):
    """Writes state.bin front to back and syncs it to the disk on leaving."""

    def __init__(self, path: Path) -> None:
        """Creates `path`."""
        self.bytes = 0
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115 (closed in __exit__)

    def append(self, kind: str, dtype: str, chunks: Iterable[memoryview]) -> Record:
        """Writes one tensor, piece by piece, and returns what the manifest says about it."""
        offset, digest = self.bytes, xxhash.xxh3_64()
        for chunk in chunks:
            digest.update(chunk)
            written = 0
            while written < len(chunk):  # a write may be short, and says so only by its result
                written += self._file.write(chunk[written:])
            self.bytes += written
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

    def __init__(self, folder: Path, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Opens a folder that `find` returned. Raises CheckpointError if its files do not agree."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._buffer = bytearray(buffer_bytes)
        path = folder / STATE_NAME
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        size = os.fstat(self._file.fileno()).st_size
        if size != self.manifest["bytes"]:
            self._file.close()
            raise CheckpointError(
                f"{path} has {size} bytes, its manifest says {self.manifest['bytes']}"
            )

    def chunks(self, record: Record) -> Iterator[memoryview]:
        """The bytes of one tensor. A chunk is valid until the next one is asked for."""
        self._file.seek(record["offset"])
        left = record["bytes"]
        while left:
            view = memoryview(self._buffer)[: min(left, len(self._buffer))]
            filled = 0
            while filled < len(view):
                count = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{self.folder / STATE_NAME} became shorter")
                filled += count
            left -= filled
            yield view

    def verify(self, records: Iterable[tuple[str, Record]], done: Callable[[int], None]) -> None:
        """Compares every checksum. `records` are tensors with a name for the error."""
        for name, record in records:
            digest = xxhash.xxh3_64()
            for chunk in self.chunks(record):
                digest.update(chunk)
                done(len(chunk))
            if digest.hexdigest() != record["xxh3_64"]:
                raise CheckpointError(
                    f"{record['kind']} of {name!r} in {self.folder / STATE_NAME} (byte "
                    f"{record['offset']} on) is damaged: checksum {digest.hexdigest()}, "
                    f"the manifest says {record['xxh3_64']}"
                )

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._file.close()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a folder whose other files are on the disk. It appears whole."""
    manifest = json.loads(json.dumps({"version": VERSION} | manifest))  # as a reader will see it
    manifest["checksum"] = _checksum(manifest)
    temporary = folder / f"{MANIFEST_NAME}.tmp"
    with open(temporary, "w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, folder / MANIFEST_NAME)
    _sync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises CheckpointError where it is damaged or of another version."""
    path = folder / MANIFEST_NAME
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        found = manifest.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}") from error
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')}; this strata reads {VERSION}"
        )
    if found != _checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which then takes the place of `path` in one step.

    REQUIRES: the caller ends by write_manifest. On an exception `path` stays as it was.
    """
    path = Path(os.path.abspath(path))
    if path.exists() and not (path / MANIFEST_NAME).is_file() and any(path.iterdir()):
        raise CheckpointError(f"{path} exists and is not a checkpoint; not replacing it")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    old = path.with_name(f"{path.name}.old-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _sync(path.parent)
    for left in [old, *_leftovers(path)]:
        shutil.rmtree(left, ignore_errors=True)


def find(path: str | Path) -> Path | None:
    """The folder to load when asked for `path`, or None where there is no complete checkpoint."""
    path = Path(os.path.abspath(path))
    if (path / MANIFEST_NAME).is_file():
        return path
    whole = [p for p in _siblings(path) if (p / MANIFEST_NAME).is_file()]
    return max(whole, key=lambda p: (p / MANIFEST_NAME).stat().st_mtime_ns, default=None)


def _siblings(path: Path) -> list[Path]:
    if not path.parent.is_dir():
        return []
    names = (f"{path.name}.tmp-", f"{path.name}.old-")
    return [p for p in path.parent.iterdir() if p.name.startswith(names) and p.is_dir()]


def _leftovers(path: Path) -> list[Path]:
    """Folders of savers that no longer live."""
    return [p for p in _siblings(path) if not _alive(p.name.rpartition("-")[2])]


def _alive(pid: str) -> bool:
    return pid.isdigit() and Path("/proc", pid).exists()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
