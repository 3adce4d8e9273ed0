"""The parameters that a module's forward reads, and what the forward changes of them in place.

    before = parameters.taken(parameters.names)     # ahead of the forward
    parameters.learn(before)                        # behind it
    with now.undone():                              # values and version counters come back
        before.put_in()
        ...                                         # the same forward again, as it began

Use from one thread at a time, while the parameters are plain ones.

Note [Copies]. A version counter tells of a change for free, but not of one through `p.data`, and
not what the value was. That takes a copy, of all parameters: the first forward that is recorded
makes one. What it changes it will change again: that alone is copied ahead of later forwards. A
first change in a later forward is told by the version counter, or not at all. Copies lie in host
memory that PyTorch did not allocate, so that what is measured of a forward is the forward's.
"""

import contextlib
from collections.abc import Collection, Iterator

import numpy
import torch
from torch import nn

from .._runtime.wrapped import CHUNK_NUMEL
from .._torch_compat import preserve_version


class Before:
    """Parameters at one moment, by name: version counters, and values of some. It refers to none
    of them itself, for kept.py counts who does."""

    def __init__(self, params: dict[str, nn.Parameter], copied: Collection[str]) -> None:
        self._params = params
        # Others cannot be read now: they are not the forward's.
        self._versions = {n: p._version for n, p in params.items() if type(p) is nn.Parameter}
        self.values = {n: _copied(params[n]) for n in copied if n in self._versions}

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

    def put_in(self) -> None:
        """Gives parameters the values that were copied."""
        for name, value in self.values.items():
            if not _is_same(self._params[name], value):
                self._params[name].detach().copy_(value)

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
                self.put_in()


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


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """See Note [Copies]."""
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
