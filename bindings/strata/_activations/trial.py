"""Tries whether a forward may run on slices of the batch.

    verdicts = Verdicts(module, module.forward)
    verdict = verdicts.find(Arguments((args, kwargs)))
    if verdict is not None and not verdict.reason:
        ...                                   # slicing.py says how

Note [Trial]. It may, where every row of the output depends on the same row of the input only.
Nothing says so, so it is tried, without gradients, on copies of arguments and buffers, from the
same random numbers and with parameters that are put back:
1. All rows but one are changed. The output of that one must stay the same, bit for bit. That finds
   normalisation over the batch, losses and negatives within it, and tensors whose first dimension
   only happens to be as long as the batch is.
2. Two slices, with modules in evaluation mode where random numbers are drawn, must give what the
   whole gives, within rounding.
A forward that changes its arguments, buffers or parameters is not cut. What a forward leaves in
attributes of modules is not looked at.
Limit: a dependence between rows that is not there yet, such as one behind a gate that is still
zero, is not seen.

Use from the thread that trains.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._torch_compat import BatchNorm
from .arguments import Arguments
from .inputs import Before, Buffers, Parameters
from .slicing import Verdict, batch_size, cut, is_cut

ROUNDING = 16  # units in the last place that two ways to sum may differ by ...
ROUNDING_MIN = 1e-3  # ... or this share: sums over thousands of float32 values
PARTS = 16
SAMPLE = 4096  # elements that tell how large the values of a tensor are


class _RefusedError(Exception):
    """A trial that ended early."""


@dataclass(eq=False)
class Verdicts:
    """Which kinds of arguments of one module's forward may be cut."""

    _module: nn.Module
    _forward: Callable[..., Any]
    _verdicts: dict[Any, Verdict] = field(default_factory=dict)

    def find(self, arguments: Arguments) -> Verdict | None:
        """Whether the batch in `arguments` may be cut: tried where that is not known. None where
        these values could not tell."""
        batch = batch_size(arguments.tensors)
        if batch < 2:
            return None
        kind = self._kind(arguments, batch)
        verdict = self._verdicts.get(kind)
        if verdict is None:
            if reason := self._obstacle(arguments):
                verdict = Verdict(reason)
            else:
                verdict = try_slices(self._module, self._forward, arguments, batch)
            if verdict is not None:
                self._verdicts[kind] = verdict
        return verdict

    def refuse(self, arguments: Arguments, reason: str) -> None:
        """Corrects what is known of this kind."""
        kind = self._kind(arguments, batch_size(arguments.tensors))
        self._verdicts[kind] = Verdict(reason)

    def _kind(self, arguments: Arguments, batch: int) -> Any:
        """What arguments of one kind have in common: all but sizes and values."""
        tensors = tuple((t.dim(), t.dtype, is_cut(t, batch)) for t in arguments.tensors)
        flags = tuple(p for p in arguments.plain if p is None or isinstance(p, bool | str))
        others = tuple(type(other) for other in arguments.others)
        return tensors, flags, others, tuple(m.training for m in self._module.modules())

    def _obstacle(self, arguments: Arguments) -> str:
        """What can be told without a trial."""
        for name, module in self._module.named_modules():
            if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
                return f"{name or type(module).__name__} normalises over the batch"
        if arguments.others:
            return f"it is given a {type(arguments.others[0]).__name__}"
        return ""


def try_slices(
    module: nn.Module, forward: Callable[..., Any], arguments: Arguments, batch: int
) -> Verdict | None:
    """See Note [Trial]. None where all rows are alike, so that a change would not be seen.

    It costs four or five forwards. Random numbers, buffers and parameters are left as they were.
    """
    tensors = arguments.tensors
    kept = {0, 1} if batch == 2 else {batch // 2}  # rows that do not change; others on both sides
    variants = [[_only(t, row) if is_cut(t, batch) else t for t in tensors] for row in kept]
    if all(
        torch.equal(a, b) for variant in variants for a, b in zip(variant, tensors, strict=True)
    ):
        return None
    parameters = Parameters(module)
    before = parameters.taken(parameters.names)
    found = Buffers(module).taken()
    try:
        with torch.no_grad(), _no_cached_casts(), found.again(), before.undone():
            trial = _Trial(module, forward, arguments, before)
            whole = trial.run(tensors, first=True)
            for row, variant in zip(kept, variants, strict=True):
                _check_row(whole, trial.run(variant), row, batch)
            with _evaluating(module) if trial.draws else nullcontext():
                whole = trial.run(tensors) if trial.draws else whole
                return Verdict("", _cut_outputs(trial, whole, cut(tensors, batch, 2), batch))
    except _RefusedError as refused:
        return Verdict(str(refused))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Verdict(f"on slices it raises {type(error).__name__}: {first}")


class _Trial:
    """Runs one forward again and again from the same random numbers."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        parameters: Before,
    ) -> None:
        self.draws = False  # whether the forward draws random numbers
        self._forward = forward
        self._arguments = arguments
        self._buffers = Buffers(module)
        self._parameters = parameters
        self._devices = sorted({t.device.index for t in arguments.tensors if t.is_cuda})

    def run(self, tensors: Sequence[torch.Tensor], first: bool = False) -> Arguments:
        """The output. `first`: looks whether random numbers are drawn and buffers changed, too.

        Raises _RefusedError where the forward changes anything.
        """
        mine = [t.detach().clone() for t in tensors]
        versions = [t._version for t in mine]
        args, kwargs = nest = self._arguments.filled(mine)
        buffers = self._buffers.taken() if first else None
        with torch.random.fork_rng(self._devices):
            before = self._random_state() if first else []
            result = self._forward(*args, **kwargs)
            after = self._random_state() if first else []
        self.draws |= any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        changed = buffers.changed() if buffers is not None else None
        if changed is not None:
            raise _RefusedError(f"its forward changes the buffer {changed!r}")
        for name in self._parameters.changed():
            raise _RefusedError(f"its forward changes the parameter {name!r}")
        now = Arguments(nest, self._arguments.layers)
        if _own(now.tensors, now.cached) != _own(mine, self._arguments.cached) or versions != [
            t._version for t in mine
        ]:
            raise _RefusedError("its forward changes its arguments")
        output = Arguments((result, now.caches), self._arguments.layers)
        if output.others:
            raise _RefusedError(f"it returns a {type(output.others[0]).__name__}")
        return output

    def _random_state(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]


def _own(tensors: Sequence[torch.Tensor], cached: set[int]) -> list[int]:
    """Which tensors a forward was given outside caches, which it may change."""
    return [id(t) for i, t in enumerate(tensors) if i not in cached]


def _only(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """A copy in which all rows but one have other, plausible values."""
    with torch.no_grad():
        other = tensor[row]
        if tensor.is_floating_point() or tensor.is_complex():
            other = other * 0.5 + 0.25
        changed = other.expand_as(tensor).clone()
        changed[row] = tensor[row]
    return changed


def _check_row(whole: Arguments, other: Arguments, row: int, batch: int) -> None:
    if whole.plain != other.plain or len(whole.tensors) != len(other.tensors):
        raise _RefusedError("its output has another form for other values")
    for a, b in zip(whole.tensors, other.tensors, strict=True):
        if is_cut(a, batch) and is_cut(b, batch):
            if not _equal(a[row], b[row]):
                raise _RefusedError("rows of its output depend on other rows of the batch")
        elif a.shape != b.shape or not _equal(a, b):
            raise _RefusedError(f"its output of shape {tuple(a.shape)} depends on the whole batch")


def _cut_outputs(
    trial: _Trial, whole: Arguments, pieces: Iterable[list[torch.Tensor]], batch: int
) -> tuple[bool, ...]:
    """Which tensors of the output are cut with the batch. Raises _RefusedError where that fails."""
    cut_ones: tuple[bool, ...] = ()
    begin = 0
    for piece in pieces:
        part = trial.run(piece)
        rows = batch_size(piece)
        if part.plain != whole.plain or len(part.tensors) != len(whole.tensors):
            raise _RefusedError("its output has another form for a slice")
        found = []
        for a, b in zip(whole.tensors, part.tensors, strict=True):
            here = is_cut(a, batch) and is_cut(b, rows)
            if not here and a.shape != b.shape:
                raise _RefusedError(f"its output of shape {tuple(a.shape)} has no batch dimension")
            expected = a[begin : begin + rows] if here else a
            if expected.shape != b.shape or not all(map(_close, _parts(expected), _parts(b))):
                raise _RefusedError("slices give something else than the whole batch")
            found.append(here)
        if cut_ones not in ((), tuple(found)):
            raise _RefusedError("its output has another form for a smaller slice")
        cut_ones = tuple(found)
        begin += rows
    return cut_ones


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Part by part: a comparison takes several times the memory of what is compared."""
    return tensor.chunk(PARTS) if tensor.dim() else [tensor]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for the kind of a NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within rounding, measured by the values around."""
    if not a.is_floating_point():
        return _equal(a, b)
    share = max(ROUNDING * torch.finfo(a.dtype).eps, ROUNDING_MIN)
    sample = a.flatten()[:: max(1, a.numel() // SAMPLE)].float().abs()
    typical = sample[sample.isfinite()].median().item() if sample.isfinite().any() else 0.0
    return bool(torch.isclose(b, a, rtol=share, atol=share * typical, equal_nan=True).all())


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast keeps casts of parameters for later operations; older PyTorch keeps even those that
    were made without gradients."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode, without train(): that may be more than a flag."""
    flags = [(m, m.training) for m in module.modules()]
    for m, _ in flags:
        m.training = False
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag
