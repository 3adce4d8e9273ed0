"""The buffers that a module's forward changes: running statistics, counters, codebooks.

    before = buffers.before()                # ahead of the forward
    changed = buffers.changed(before)        # behind it
    with as_they_were(changed):              # the same forward again, on copies
        ...

Which ones change is found in the first forward, and again in each new mix of training and
evaluation; from then on the others cost nothing. Use from one thread at a time.

Note [Values]. Kernels of batch normalisation write running statistics without telling the version
counter of the tensor. So what changed is found by comparing values.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Buffer:
    """A buffer and its value at one moment."""

    name: str
    owner: dict[str, torch.Tensor | None]
    tensor: torch.Tensor
    value: torch.Tensor

    def is_changed(self) -> bool:
        """Whether it is another tensor now, or has another value."""
        now = self.owner.get(self.name)
        return now is not self.tensor or not torch.equal(now, self.value)


class Buffers:
    """The buffers of one module and all below it."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [m for m in module.modules() if m._buffers]
        self._names: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}

    def all(self) -> list[Buffer]:
        """All of them, as they are."""
        return _taken([(m, name) for m in self._owners for name in m._buffers])

    def before(self) -> list[Buffer]:
        """Those that the forward may change, as they are."""
        known = self._names.get(self._mode())
        return self.all() if known is None else _taken(known)

    def changed(self, before: list[Buffer]) -> list[Buffer]:
        """Those of `before` that the forward did change, as they were."""
        mode = self._mode()
        if mode in self._names:
            return before
        changed = [buffer for buffer in before if buffer.is_changed()]
        owners = {id(m._buffers): m for m in self._owners}
        self._names[mode] = [(owners[id(buffer.owner)], buffer.name) for buffer in changed]
        return changed

    def _mode(self) -> tuple[bool, ...]:
        return tuple(m.training for m in self._owners)


@contextlib.contextmanager
def as_they_were(buffers: list[Buffer]) -> Iterator[None]:
    """Puts copies with the old values in the place of buffers, and the buffers back at the end."""
    now = [buffer.owner.get(buffer.name) for buffer in buffers]
    for buffer in buffers:
        buffer.owner[buffer.name] = buffer.value.clone()
    try:
        yield
    finally:
        for buffer, tensor in zip(buffers, now, strict=True):
            buffer.owner[buffer.name] = tensor


def _taken(places: list[tuple[nn.Module, str]]) -> list[Buffer]:
    result = []
    for module, name in places:
        tensor = module._buffers.get(name)
        if tensor is not None:
            result.append(Buffer(name, module._buffers, tensor, tensor.detach().clone()))
    return result
