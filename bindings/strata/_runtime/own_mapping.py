"""Memory for values that are read from pages, looked at, and forgotten.

result = empty(torch.Size([4096, 4096]), torch.float32)

Note [Heap]. Once a program has freed some tensors of up to 32 MiB, the C library takes memory of
that size from its heap. Older ones (before 2.38) then leave holes that an aligned block of the same
size does not fit, so reading one tensor behind the other took the memory of all of them. A mapping
of its own goes back to the system with its tensor.
"""

import mmap

import torch

_MAPPED_BYTES_MIN = 1 << 20  # smaller ones are not worth a call of the system


def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the CPU, in a mapping of its own where it is large. See Note [Heap]."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _MAPPED_BYTES_MIN:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)


@torch.no_grad()
def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of any tensor on the CPU, in such a mapping."""
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
