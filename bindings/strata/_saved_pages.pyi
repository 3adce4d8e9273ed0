"""Reading the pages of a snapshot (offload/storage/saved_pages.hpp), and what they hold as float32;
the hash by which bytes of files are known, and who is in an SSD folder
(offload/storage/directory_lock.hpp).
For type checkers only: import these from _core.
"""

from typing import Any, Literal

from typing_extensions import Buffer

from ._core import DtypeName

class PageFiles:
    """Page files of another session, to be the next one's: opened to write, which nobody else may
    meanwhile. Raises StrataError, with fault "busy" where somebody does."""

    def __init__(self, folders: list[str], names: list[str]) -> None: ...
    def identities(self) -> list[tuple[int, int, int]]:
        """Of each file: device, inode, and how many names it has."""

class SavedPages:
    """Pages in the files of another session, which may be running: `slots` are slot, version,
    checksum and number of bytes, none twice. Raises StrataError where a file cannot be opened or is
    too short, or a slot cannot hold so much."""

    def __init__(
        self,
        paths: list[str],
        names: list[str],
        page_bytes: int,
        slots: list[tuple[int, int, int, int]],
        io_engine: str = "auto",
    ) -> None: ...
    def read(self, slots: list[int], address: int) -> None:
        """Reads what the slots hold, one every `page_bytes`, to memory that is aligned to 4096, and
        verifies it. What lies behind it stays as it is. Raises StrataError with fault "corrupt",
        "io" or "short_read"."""

class TakenSnapshot:
    """What a session holds in its slots, as _storage/snapshots/format.py describes it."""

    page_bytes: int
    scale_bytes: int  # of the scale area, which has those of this rank's moments
    chunk_count: int
    param_steps: list[int]  # by parameter
    def mine(self, number: int) -> bool:
        """Whether this rank owns the chunk, and so has its pages."""
    def chunk(self, number: int) -> dict[str, Any]: ...
    def scale_places(self, number: int) -> list[int]:
        """By moment: where its scales begin in the scale area, of a chunk of this rank."""

# A parameter of a page and what its residual adds (0: none), as float32; and moments likewise.
def join_master(dtype: DtypeName, param: int, residual: int, count: int, to: int) -> None: ...
def load_moments(
    dtype: Literal["float32", "bfloat16", "block8"],
    rule: str,
    number: int,
    stored: int,
    scales: int,
    count: int,
    to: int,
) -> None: ...

class Hasher:
    """XXH3-64, without a seed, of bytes that come in pieces. Use from one thread at a time."""

    def __init__(self) -> None: ...
    def update(self, buffer: Buffer) -> None:
        """Without the GIL. BufferError where the bytes are not in one piece."""
    def hexdigest(self) -> str:
        """Of all bytes so far: 16 digits, the highest first."""

def open_lock_file(folder: str) -> int:
    """A descriptor of the lock file of an SSD folder, which it makes where there is none. Raises
    StrataError where something else has that name, or another user's file."""

def remove_leftovers(folder: str) -> list[str]:
    """Removes swap files of a killed process from an SSD folder that is not in use. Names them."""
