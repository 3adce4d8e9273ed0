"""What is known of saved tensors that are off the device: storages, and views of them.

    record = Swapped(owner, storage)
    record.saves.append(save)                        # the core has begun to copy its bytes
    view = SwappedView(tensor, hollow, record, stretch)
    ...                                              # the tensor's memory may be gone
    view.check()
    tensor = view.over(restored, record.begin)       # the same tensor in other memory

Threads: swapping.py says who may use them when.

Note [Versions]. Each view keeps a *witness*: a tensor without memory that shares the version
counter of the tensor that was saved. So a change in place is noticed as plain PyTorch would notice
it, while the copy is under way and also when the tensor's memory is long gone. What comes back
shares the counter too.
"""

import enum
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._config.managed import reach


class Owner(Protocol):
    """Who is told when nobody refers to a Swapped any more."""

    forgotten: deque[int]  # saves


class State(enum.Enum):
    """Where the bytes of a Swapped are."""

    LEAVING = enum.auto()  # on the device; their copy is under way
    AWAY = enum.auto()  # in pages only
    COMING = enum.auto()  # in pages; on their way into `storage`
    HERE = enum.auto()  # in pages and in `storage`


@dataclass(slots=True, eq=False)
class Stretch:
    """What one stretch of a module's forward saved."""

    use: int
    previous: "Stretch | None"
    records: "list[weakref.ref[Swapped]]" = field(default_factory=list)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Swapped:
    """Bytes [begin, end) of a storage that autograd saved.

    Invariants:
    1. LEAVING: Swapping refers to it, so that neither side of the copy is freed under it.
    2. COMING: Swapping has a Flight for it.
    3. `storage` is None exactly when AWAY. Its first byte is byte `base` of the original.
    4. But for 1 only views refer to it: when the last is gone, so is the core's copy, once no copy
       is under way.
    """

    owner: Owner
    storage: torch.UntypedStorage | None
    origin: StorageWeakRef = field(init=False)  # its key stays taken for as long as this lives
    saves: list[int] = field(default_factory=list)  # the core's number, once there is one
    stream: int | None = None  # that `storage` was allocated on, where that was for this
    state: State = State.LEAVING
    base: int = 0
    begin: int = 0
    end: int = 0
    version: int = 0
    to_ssd: bool = False
    staged: bool = False
    wanted: bool = False  # by the backward that runs now
    use: int = 0  # that saved it
    stretch: Stretch | None = None  # the last one that lists it

    def __post_init__(self) -> None:
        self.origin = StorageWeakRef(self.storage)

    @property
    def save(self) -> int:
        """The core's number for it. REQUIRES: it has one."""
        return self.saves[0]

    @property
    def has_begun(self) -> bool:
        """Whether the core has it. No room, or an exception that came before, and it has not."""
        return bool(self.saves) and self.saves[0] >= 0

    def __del__(self) -> None:
        # This runs on any thread and between any two lines of Swapping: so it only leaves a note.
        self.owner.forgotten.extend(self.saves)


class Flight:
    """A copy back to the device that may be under way, and what it needs."""

    __slots__ = ("record", "save", "storage", "stream")

    def __init__(self, record: Swapped, storage: torch.UntypedStorage, stream: int) -> None:
        self.record = weakref.ref(record)
        self.save = record.save
        self.storage: torch.UntypedStorage | None = storage  # see swapping.py, Note [Streams]
        self.stream = stream  # that the storage was allocated on


class SwappedView:
    """What autograd gets to hold in a tensor's place: where it lies in a Swapped."""

    __slots__ = ("dtype", "offset", "record", "shape", "stretch", "stride", "version", "witness")

    def __init__(
        self, tensor: torch.Tensor, hollow: torch.Tensor, record: Swapped, stretch: Stretch
    ) -> None:
        self.record = record
        self.stretch = stretch
        self.witness = tensor.detach()  # see Note [Versions]
        self.witness.data = hollow
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()  # bytes in the original
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def check(self) -> None:
        """Raises RuntimeError where the tensor was changed in place since it was saved."""
        if self.witness._version != self.version:
            raise changed(tuple(self.shape), "it was changed in place")

    def over(self, storage: torch.UntypedStorage, base: int) -> torch.Tensor:
        """The tensor, in a storage that begins at byte `base` of the original."""
        bare = torch.empty(0, dtype=self.dtype, device=storage.device)
        bare.set_(storage, (self.offset - base) // self.dtype.itemsize, self.shape, self.stride)
        tensor = self.witness.detach()
        tensor.data = bare
        return tensor


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches: from the first to behind the last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return begin, begin + int(tensor.nbytes)
    return begin, begin + reach(tensor) * size


def changed(what: object, how: str) -> RuntimeError:
    """What plain PyTorch would raise, for a tensor changed between forward and backward."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified: {what}: {how} "
        "between forward and backward"
    )
