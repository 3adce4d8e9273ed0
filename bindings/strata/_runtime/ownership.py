"""Who else has the memory of a tensor.

owner = grad if owns_memory(grad) else None     # only then may it be lent
"""

import sys

import torch

from .._torch_compat import tensors_over


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, an array or PyTorch's own object has the tensor's memory."""
    storage = tensor.untyped_storage()
    # The tensor and `storage` use it, which is the one object for it that Python has.
    return tensors_over(storage._cdata) != 2 or sys.getrefcount(storage) != _REFERENCES


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether nobody else can write to the memory of the tensor, or keeps it: so it may be lent.

    What a custom backward returns may be a view of something that is written again."""
    storage = tensor.untyped_storage()
    own = storage.resizable() and storage.nbytes() == tensor.nbytes
    del storage
    return own and not is_shared(tensor)


def _references(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_REFERENCES = _references(torch.empty(1))  # to a storage that nobody else has
