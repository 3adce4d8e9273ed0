"""What stands for the memory of a parameter that rests in pages.

    storage = p.untyped_storage()
    storage.data_ptr(), storage.nbytes()      # tell it from those of other parameters

Libraries that write models compare the addresses of tensors to find those that are tied, or views
of one another. So paged tensors have addresses, as far apart as their bytes are on the device, and
storages that know their size. But these addresses are of no process: who follows one ends at once,
and never reads what happens to lie there.

Note [torch.save]. A tensor pickles as a storage and its place there. torch.save keeps the storages
of all tensors, and writes their bytes one after the other when it has pickled everything; of one
that is not on the CPU it asks for a copy there, and drops that when it is written. So what a tensor
without memory pickles as is a storage on no device (`meta`), whose copy is its values, read in that
moment. The file is that of a plain tensor.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .._torch_compat import rebuild_tensor

RAW_MEMORY = (
    "would give away the raw memory of a parameter that strata moves between tiers; use "
    "p.detach().clone(), strata.export_safetensors or strata.unwrap"
)


# Above all that a process on x86-64 or ARM can map, and below what ARM may ignore of an address.
UNREACHABLE = 1 << 55


def address_of(tensor: torch.Tensor) -> int:
    """For comparing. Call it where the class of the tensor does not interfere."""
    return tensor.data_ptr() | UNREACHABLE


class PagedStorage:
    """The storage of one tensor and of all its views. Two of them are equal where they are of
    the same tensor."""

    def __init__(self, address: int, nbytes: int, device: torch.device, itemsize: int) -> None:
        """itemsize: bytes of an element, 1 untyped."""
        self.device = device
        self._address = address
        self._bytes = nbytes
        self._itemsize = itemsize

    def data_ptr(self) -> int:
        """Good for comparing only."""
        return self._address

    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self._bytes

    def size(self) -> int:
        """Elements of a typed storage, bytes of an untyped one."""
        return self._bytes // self._itemsize

    def __len__(self) -> int:
        return self.size()

    def element_size(self) -> int:
        """Bytes."""
        return self._itemsize

    def untyped(self) -> "PagedStorage":
        """The same, counted in bytes."""
        return PagedStorage(self._address, self._bytes, self.device, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagedStorage) and self._address == other._address

    def __hash__(self) -> int:
        return hash(self._address)

    def __getitem__(self, where: Any) -> NoReturn:
        """Raises RuntimeError, as all that would read or change the bytes."""
        raise RuntimeError(f"an element of its storage {RAW_MEMORY}")

    def __getattr__(self, name: str) -> NoReturn:
        """Raises RuntimeError. Called for what is not above."""
        raise RuntimeError(f"{name} of its storage {RAW_MEMORY}")


def saved_tensor(
    tensor: torch.Tensor,
    identity: int,
    read: Callable[[], torch.Tensor],
    offset: int = 0,
    nbytes: int | None = None,
) -> Any:
    """What a tensor's __reduce_ex__() returns, so that it pickles as a plain one. See Note
    [torch.save].

    identity: the same number for all tensors that share their memory. read: gives the contiguous
    values of all that memory, of `nbytes`; default: the tensor's own. offset: of the tensor there,
    in elements.
    """
    late = _LateStorage(identity, tensor.nbytes if nbytes is None else nbytes, read)
    storage = object.__new__(_LateTypedStorage)
    storage.dtype = tensor.dtype
    storage._untyped_storage = late
    storage._fake_device = tensor.device  # as the file is to tell it
    place = (offset, tuple(tensor.shape), tensor.stride())
    return rebuild_tensor, (storage, *place, False, OrderedDict())


class _LateStorage:
    """The storage of a tensor without memory, for torch.save."""

    device = torch.device("meta")

    def __init__(self, identity: int, nbytes: int, read: Callable[[], torch.Tensor]) -> None:
        self._cdata = identity  # what torch.save knows it by
        self._bytes = nbytes
        self._read = read

    def nbytes(self) -> int:
        return self._bytes

    def cpu(self) -> torch.UntypedStorage:
        """The values, in memory of their own."""
        values = self._read().detach().cpu().contiguous()
        assert values.nbytes == self._bytes
        storage = values.untyped_storage()
        return storage if storage.nbytes() == self._bytes else values.clone().untyped_storage()

    def data_ptr(self) -> NoReturn:
        """Raises RuntimeError. Called by torch.save in its old format alone."""
        raise RuntimeError(
            "torch.save in its old format cannot write tensors whose values strata reads late: "
            "leave out _use_new_zipfile_serialization=False, or save copies of them"
        )


class _LateTypedStorage(torch.TypedStorage):
    """The same with a dtype, which is what tensors pickle as."""

    def __reduce__(self) -> Any:
        """For pickle itself, which has no files for storages: with all bytes."""
        late: Any = self._untyped_storage
        plain = torch.TypedStorage(wrap_storage=late.cpu(), dtype=self.dtype, _internal=True)
        return plain.__reduce__()
