"""What stands for the memory of a parameter that rests in pages.

    storage = p.untyped_storage()
    storage.data_ptr(), storage.nbytes()      # tell it from those of other parameters

Libraries that write models compare the addresses of tensors to find those that are tied, or views
of one another. So paged tensors have addresses, as far apart as their bytes are on the device, and
storages that know their size. But these addresses are of no process: who follows one ends at once,
and never reads what happens to lie there.
"""

from typing import Any, NoReturn

import torch

RAW_MEMORY = (
    "would give away the raw memory of a parameter that strata moves between tiers; use "
    "p.detach().clone(), strata.export_safetensors or strata.unwrap"
)


# Above all that a process on x86-64 or ARM can map, and below what ARM may ignore of an address.
_UNREACHABLE = 1 << 55


def address_of(tensor: torch.Tensor) -> int:
    """For comparing. Call it where the class of the tensor does not interfere."""
    return tensor.data_ptr() | _UNREACHABLE


class PagedStorage:
    """The storage of one parameter and of all its views. Two of them are equal where they are of
    the same parameter."""

    def __init__(self, alias: torch.Tensor, itemsize: int) -> None:
        """`alias`: a plain tensor over the parameter. itemsize: bytes of an element, 1 untyped."""
        self.device = alias.device
        self._address = address_of(alias)
        self._bytes = alias.nbytes
        self._itemsize = itemsize

    def data_ptr(self) -> int:
        """Good for comparing only."""
        return self._address

    def nbytes(self) -> int:
        """Of the whole parameter."""
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
        other = object.__new__(PagedStorage)
        other.__dict__.update(self.__dict__, _itemsize=1)
        return other

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
