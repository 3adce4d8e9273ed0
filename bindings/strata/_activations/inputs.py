"""What a forward finds, for the same forward again: the buffers of its module, the parameters that
it changes in place, and its inputs.

    found = buffers.taken()                         # ahead of the forward
    before = parameters.taken(parameters.names)
    buffers.learn(found)                            # behind it: what it changes is copied at once
    parameters.learn(before)                        # from now on
    with found.again(), now.undone():               # the same forward again, on what it found
        ...
    found.put_back()                                # the very buffers with the values that they had

Use from one thread at a time; parameters while they are plain ones.

Note [Copies of buffers]. Any forward may change any buffer, also one that was left alone for a
thousand steps, and kernels of batch normalisation do so without telling the version counter of the
tensor. So each buffer is copied ahead of every forward, but lazily: both share the memory until one
is written to, through whichever kernel, and only then the writer gets memory of its own. A table
that nobody changes costs two microseconds and no byte. Some are copied at once. A buffer that a
forward has changed before will change again, and its address has to stay. Small parts of large
storages, and memory that is not an allocator's, cannot be shared. Where CUDA graphs may write to a
buffer they know its address only, so there all are copied.

Note [Copies of parameters]. A version counter tells of a change for free, but not of one through
`p.data`, and not what the value was. That takes a copy, of all parameters: the first forward that
is recorded makes one. What it changes it will change again: that alone is copied ahead of later
forwards. A first change in a later forward is told by the version counter, or not at all. Copies
lie in host memory that PyTorch did not allocate: measurements of a forward do not see them.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from .._runtime.paged_run import is_paged
from .._runtime.streams import graphs_in_use
from .._runtime.wrapped import CHUNK_NUMEL
from .._torch_compat import lazy_clone, preserve_version, shares_memory

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


@dataclass
class Found:
    """The buffers of a module and all below it at one moment."""

    owners: list[tuple[Owner, dict[str, Buffer]]]

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
        """Notes which of them a forward has changed. See Note [Copies of buffers]."""
        for place, (owner, buffers) in enumerate(found.owners):
            for name, buffer in buffers.items():
                if buffer.may_be_changed(owner.get(name)):
                    self._written.add((place, name))


def _copied(tensor: torch.Tensor, lazily: bool = True) -> torch.Tensor:
    """See Note [Copies of buffers]."""
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


class Before:
    """Parameters at one moment, by name: version counters, and values of some. It refers to none
    of them itself, for pins.py counts who does."""

    def __init__(self, params: dict[str, nn.Parameter], copied: Collection[str]) -> None:
        self._params = params
        # Others cannot be read now: they are not the forward's.
        self._versions = {n: p._version for n, p in params.items() if type(p) is nn.Parameter}
        self.values = {n: _on_host(params[n]) for n in copied if n in self._versions}

    def changed(self) -> list[str]:
        """Those that were written to since, with another value or with the same."""
        differing = set(self.differing())
        return [n for n in self._versions if n in differing or self._is_written(n)]

    def differing(self) -> list[str]:
        """Those that have another value now; of one without a copy, those that were written to."""
        values, params = self.values, self._params
        return [
            n
            for n in self._versions
            if (not _is_same(params[n], values[n]) if n in values else self._is_written(n))
        ]

    def silent(self) -> list[str]:
        """Those that have another value now, and whose version counter does not tell."""
        return [n for n in self.differing() if not self._is_written(n)]

    def _is_written(self, name: str) -> bool:
        return self._params[name]._version != self._versions[name]

    def keep_only(self, names: Collection[str]) -> None:
        """Frees the other copies."""
        self.values = {n: value for n, value in self.values.items() if n in names}

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """At the end those that were copied are as they were, their version counters too."""
        with contextlib.ExitStack() as preserved:
            for name in self.values:
                keep = preserve_version(self._params[name])
                preserved.enter_context(keep)
            try:
                yield
            finally:
                for name, value in self.values.items():
                    if not _is_same(self._params[name], value):
                        self._params[name].detach().copy_(value)


class Parameters:
    """The parameters of one module and all below it."""

    def __init__(self, module: nn.Module) -> None:
        self._params = dict(module.named_parameters())
        self.names = list(self._params)
        self.known = False  # a forward has shown which of them it changes
        self.rewritten: set[str] = set()  # those that a forward has changed

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._params.values())

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._params[name]

    def taken(self, copied: Collection[str]) -> Before:
        """As they are now. `copied`: with their values."""
        return Before(self._params, copied)

    def learn(self, before: Before) -> list[str]:
        """Notes which of them a forward has changed; those are returned."""
        changed = before.changed()
        self.known = True
        self.rewritten.update(changed)
        return changed


class Inputs:
    """The inputs of one unit's forwards that are computed again. See forwards.py Note [Proof]."""

    def __init__(self) -> None:
        self.copied = False  # what the second run gets are copies
        self._last: list[tuple[torch.Tensor, int]] = []  # of the last forward, with their versions

    def kept(
        self, tensors: list[torch.Tensor], given: set[int], find: Callable[[int], int]
    ) -> list[torch.Tensor]:
        """What the second run gets in their place. `given`: storages that the model was called
        with; `find`: the parameter in whose memory an address lies, or -1."""
        if not self.copied:
            return tensors
        kept = []
        for t in tensors:
            alone = (t.is_leaf and t.requires_grad) or is_paged(t)
            is_others = storage_of(t) in {None, *given} or alone or find(t.data_ptr()) >= 0
            if t.is_floating_point() and not is_others:
                self._last.append((t.detach(), t._version))
                t = t.clone()
            kept.append(t)
        return kept

    def look(self) -> None:
        """Another unit begins, or the model's forward is over: has anybody changed the last inputs?
        If not, they are not copied any more."""
        if self._last:
            self.copied = any(t._version != version for t, version in self._last)
            self._last.clear()


def storage_of(tensor: torch.Tensor) -> int | None:
    """Which storage it lies in; None for one that has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """See Note [Copies of parameters]."""
    if parameter.numel() == 0:  # numpy gives such an array no strides
        return parameter.detach().to("cpu", copy=True)
    memory = torch.from_numpy(numpy.empty(parameter.nbytes, numpy.uint8))
    copied = memory.view(parameter.dtype).view(parameter.shape)
    return copied.copy_(parameter.detach())


def _is_same(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Bit for bit. Part by part, for what is on a GPU comes here to be compared."""
    pairs = zip(
        _flat_bytes(parameter).split(CHUNK_NUMEL),
        _flat_bytes(value).split(CHUNK_NUMEL),
        strict=True,
    )
    return all(torch.equal(now.cpu(), then) for now, then in pairs)
