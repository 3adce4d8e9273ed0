"""The buffers of a module: what a forward found, for the same forward again.

    found = buffers.taken()          # ahead of the forward
    buffers.learn(found)             # behind it: what it changes is copied at once from now on
    with found.again():              # the same forward again, on copies of what it found
        ...
    found.changed()                  # the name of a buffer that has another value now, or None
    found.put_back()                 # the very buffers with the values that they had

Use from one thread at a time.

Note [Copies]. Any forward may change any buffer, also one that was left alone for a thousand steps,
and kernels of batch normalisation do so without telling the version counter of the tensor. So each
buffer is copied ahead of every forward, but lazily: both share the memory until one is written to,
through whichever kernel, and only then the writer gets memory of its own. A table that nobody
changes costs two microseconds and no byte. What a forward has changed once it will change again:
that is copied at once, so that its address stays. So is what cannot be shared: small parts of large
storages, memory that is not an allocator's, and all of them where CUDA graphs, which know addresses
only, may write.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._runtime.streams import graphs_in_use
from .._torch_compat import lazy_clone, shares_memory

Owner = dict[str, torch.Tensor | None]  # a module's own


@dataclass(slots=True)
class Buffer:
    """A buffer and a copy of it."""

    tensor: torch.Tensor | None
    value: torch.Tensor | None

    def may_be_changed(self, now: torch.Tensor | None) -> bool:
        """Whether it is another tensor, or was written to as far as can be told for free."""
        return now is not self.tensor or (now is not None and not shares_memory(now))

    def is_changed(self, now: torch.Tensor | None) -> bool:
        """Whether it is another tensor, or has another value."""
        if now is not self.tensor or now is None or self.value is None:
            return now is not self.tensor
        return self.may_be_changed(now) and not torch.equal(now, self.value)


class Found:
    """The buffers of a module and all below it at one moment."""

    def __init__(self, owners: list[tuple[Owner, dict[str, Buffer]]]) -> None:
        self.owners = owners

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Puts copies of what was found in the place of the buffers, and those back at the end."""
        now = [dict(owner) for owner, _ in self.owners]
        copies: dict[int, torch.Tensor | None] = {id(None): None}  # modules may share a buffer
        try:
            for owner, found in self.owners:
                owner.clear()
                for name, buffer in found.items():
                    key = id(buffer.tensor)
                    if key not in copies and buffer.value is not None:
                        copies[key] = _copied(buffer.value)
                    owner[name] = copies[key]
            yield
        finally:
            for (owner, _), buffers in zip(self.owners, now, strict=True):
                owner.clear()
                owner.update(buffers)

    def changed(self) -> str | None:
        """The name of a buffer that came, went, was exchanged or has another value."""
        for owner, found in self.owners:
            if owner.keys() != found.keys():
                return next(iter(owner.keys() ^ found.keys()))
            for name, buffer in found.items():
                if buffer.is_changed(owner[name]):
                    return name
        return None

    def put_back(self) -> None:
        """The very tensors that were found, with the values that they had."""
        for owner, found in self.owners:
            owner.clear()
            for name, buffer in found.items():
                owner[name] = buffer.tensor
                tensor, value = buffer.tensor, buffer.value
                if tensor is not None and value is not None and buffer.is_changed(tensor):
                    with torch.no_grad():
                        tensor.copy_(value)


class Buffers:
    """The buffers of one module and all below it."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._written: set[tuple[int, str]] = (
            set()
        )  # by module, and name: those that forwards change

    def taken(self) -> Found:
        """All of them, as they are."""
        lazily = not graphs_in_use()
        copies: dict[int, Buffer] = {}
        owners = []
        for place, module in enumerate(self._modules):
            found = {}
            for name, tensor in module._buffers.items():
                buffer = copies.get(id(tensor))
                if buffer is None:
                    lazy = lazily and (place, name) not in self._written
                    value = None if tensor is None else _copied(tensor, lazy)
                    buffer = copies[id(tensor)] = Buffer(tensor, value)
                found[name] = buffer
            owners.append((module._buffers, found))
        return Found(owners)

    def learn(self, found: Found) -> None:
        """Notes which of them a forward has changed. See Note [Copies]."""
        for place, (owner, buffers) in enumerate(found.owners):
            for name, buffer in buffers.items():
                if buffer.may_be_changed(owner.get(name)):
                    self._written.add((place, name))


def _copied(tensor: torch.Tensor, lazily: bool = True) -> torch.Tensor:
    """See Note [Copies]."""
    with torch.no_grad():
        copied = _lazy_clone(tensor) if lazily else tensor.clone()
    return copied.requires_grad_() if tensor.requires_grad else copied


def _lazy_clone(tensor: torch.Tensor) -> Any:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        return tensor.clone()
    try:
        return lazy_clone(tensor)
    except RuntimeError:  # memory of a file, of another process or of NumPy
        return tensor.clone()
