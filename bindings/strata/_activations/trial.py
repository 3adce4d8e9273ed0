"""Tries what may be done with a forward: run again in the backward, or run on slices of the batch.

    reason = why_not_again(module, module.forward, Arguments((args, kwargs)))   # "": it may
    verdicts = Verdicts(module, module.forward)
    verdict = verdicts.find(Arguments((args, kwargs)))
    if verdict is not None and not verdict.reason:
        ...                                   # slicing.py says how

A trial runs the forward where memory is needed, and nowhere else. It runs on copies of arguments,
keeps nothing for a backward, and leaves nothing behind: attributes, buffers, parameters,
generators of random numbers and what else the forward can reach (reach.py) are put back, variables
of the context are set in a copy of it, and hooks of the user on modules are not called.

Note [Again]. A forward may be computed again where two runs that find the same leave the same:
output, attributes and generators, bit for bit. It may not where it takes from an iterator, or
changes parameters, its arguments, a ContextVar, or what lies deeper than attributes (reach.py): a
second run would do that twice. It is tried again when attributes or arguments come, or get another
type.

Note [Slices]. A forward may run on slices where every row of the output depends on the same row of
the input only. Nothing says so, so it is tried:
1. All rows but one are changed. The output of that one must stay the same, bit for bit. That finds
   normalisation over the batch, losses and negatives within it, and tensors whose first dimension
   only happens to be as long as the batch is.
2. Two slices, with modules in evaluation mode where random numbers are drawn, must give what the
   whole gives, within rounding.
A forward that changes its arguments, buffers, parameters or attributes is not cut, nor one that
draws from Python's, NumPy's or a generator of its own.
Limit: a dependence between rows that is not there yet, such as one behind a gate that is still
zero, is not seen.

Use from the thread that trains.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch_compat import GLOBAL_HOOKS, BatchNorm
from .arguments import Arguments
from .attributes import Attributes, owners_of
from .inputs import Buffers, Parameters
from .reach import NOT_THERE, Reach, same, same_tensors
from .slicing import Verdict, batch_size, cut, is_cut

ROUNDING = 16  # units in the last place that two ways to sum may differ by ...
ROUNDING_MIN = 1e-3  # ... or this share: sums over thousands of float32 values
PARTS = 16
SAMPLE = 4096  # elements that tell how large the values of a tensor are
UNEXPLAINED = (
    "Nothing that strata puts back explains that. The trial called the forward twice more than you "
    "did: where it counts or draws in a place that strata cannot see, that went on too. "
    'activations="keep" makes no trial'
)
# A module's own hooks, by the names that torch gives them.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
        return tensors, arguments.form, tuple(m.training for m in self._module.modules())

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
    """See Note [Slices]. None where all rows are alike, so that a change would not be seen.

    It costs four or five forwards.
    """
    tensors = arguments.tensors
    kept = {0, 1} if batch == 2 else {batch // 2}  # rows that do not change; others on both sides
    variants = [[_only(t, row) if is_cut(t, batch) else t for t in tensors] for row in kept]
    if all(
        torch.equal(a, b) for variant in variants for a, b in zip(variant, tensors, strict=True)
    ):
        return None
    try:
        with torch.no_grad(), _Trial.of(module, forward, arguments) as trial:
            first = trial.run(tensors)
            first.refuse_what_counts()
            whole = first.output
            for row, variant in zip(kept, variants, strict=True):
                _check_row(whole, trial.run(variant).output, row, batch)
            if first.draws:
                trial.evaluates = True
                whole = trial.run(tensors).output
            return Verdict("", _cut_outputs(trial, whole, cut(tensors, batch, 2), batch))
    except _RefusedError as refused:
        return Verdict(str(refused))
    except Exception as error:
        return Verdict(f"on slices it raises {_in_a_line(error)}")


def why_not_again(module: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> str:
    """See Note [Again]: "" where the forward may be computed again, at the cost of two forwards.

    Raises torch.OutOfMemoryError.
    """
    try:
        with _Trial.of(module, forward, arguments) as trial:
            first, second = trial.run(arguments.tensors), trial.run(arguments.tensors)
            a, b = first.output, second.output
            alike = a.plain == b.plain and len(a.tensors) == len(b.tensors)
            if not alike or not all(map(_is_same, a.tensors, b.tensors)):
                return f"its forward gives another output the second time. {UNEXPLAINED}"
            if what := first.after.differing(second.after):
                return f"its forward leaves {what} otherwise the second time. {UNEXPLAINED}"
            return ""
    except _RefusedError as refused:
        return str(refused)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its forward raises {_in_a_line(error)} when it is tried"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@dataclass
class _Run:
    """What one run of a forward gave, and left."""

    output: Arguments
    after: Attributes
    draws: bool  # from torch's own generators
    counts: str  # what it changes or draws beside that, in words; "" where nothing

    def refuse_what_counts(self) -> None:
        """Raises _RefusedError where it matters how often the forward runs, or what it returns
        cannot be put together."""
        if self.counts:
            raise _RefusedError(self.counts)
        if self.output.others:
            raise _RefusedError(f"it returns a {type(self.output.others[0]).__name__}")


class _Trial:
    """Runs one forward again and again on the same arguments, attributes, buffers, parameters and
    random numbers."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments
    ) -> None:
        self.evaluates = False  # all modules run in evaluation mode, without train()
        self._module = module
        self._forward = forward
        self._arguments = arguments
        self._owners = owners_of(module, arguments.others)
        self._found = Attributes(self._owners)
        roots = [
            *((variable.name, value) for variable, value in self._found.context.items()),
            *((f"argument of type {type(o).__name__}", o) for o in arguments.others),
            *((type(inner).__name__, inner) for inner in module.modules()),
            ("forward", forward),
        ]
        self._reach = Reach(roots, self._owners)
        self._buffers = Buffers(module)
        self._found_buffers = self._buffers.taken()
        parameters = Parameters(module)
        self._parameters = parameters.taken(parameters.names)
        self._devices = sorted({t.device.index for t in arguments.tensors if t.is_cuda})

    @classmethod
    @contextmanager
    def of(
        cls, module: nn.Module, forward: Callable[..., Any], arguments: Arguments
    ) -> Iterator["_Trial"]:
        """At the end all is as it was. Raises _RefusedError where no forward can be tried."""
        trial = cls(module, forward, arguments)
        _refuse_iterator(trial._reach.iterator)
        with ExitStack() as stack:
            for context in (
                saved_tensors_hooks(_drop, _never),
                _no_cached_casts(),
                _without_hooks([*module.modules(), *trial._reach.modules]),
            ):
                stack.enter_context(context)
            stack.enter_context(trial._parameters.undone())
            stack.callback(trial._reach.empty_caches)
            stack.callback(trial._put_back)
            yield trial

    def run(self, tensors: Sequence[torch.Tensor]) -> _Run:
        """Raises _RefusedError where the forward changes what cannot be changed twice."""
        found = self._found
        self._put_back()
        if self.evaluates:
            for m in self._module.modules():
                m.training = False
        mine = [t.clone() for t in tensors]
        versions = [t._version for t in mine]
        args, kwargs = nest = self._arguments.filled(mine)
        with self._found_buffers.again(), torch.random.fork_rng(self._devices):
            buffers, before = self._buffers.taken(), self._random_state()
            context = found.context.copy()
            result = context.run(self._forward, *args, **kwargs)
            draws = not all(map(torch.equal, before, self._random_state()))
            changed = buffers.changed()
        if name := self._reach.changed():
            raise _RefusedError(f"its forward changes what {name!r} holds")
        if name := _changed_variable(found.context, context):
            raise _RefusedError(f"its forward sets the ContextVar {name!r}")
        for name in self._parameters.changed():
            raise _RefusedError(f"its forward changes the parameter {name!r}")
        now = Arguments(nest, self._arguments.layers)
        if _own(now.tensors, now.cached) != _own(mine, self._arguments.cached) or versions != [
            t._version for t in mine
        ]:
            raise _RefusedError("its forward changes its arguments")
        after = Attributes(self._owners)
        _refuse_iterator(after.iterator())
        counts = ""
        if changed is not None:
            counts = f"its forward changes the buffer {changed!r}"
        elif name := found.assigned(after):
            counts = f"its forward assigns the attribute {name!r}"
        elif found.drawn(after):
            counts = "its forward draws from a generator that is not torch's own"
        output = Arguments((result, now.caches), self._arguments.layers)
        output.tensors = [t.detach() for t in output.tensors]
        return _Run(output, after, draws, counts)

    def _put_back(self) -> None:
        self._found.put_back()
        self._reach.put_back()

    def _random_state(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]


def _changed_variable(before: Context, after: Context) -> str:
    """The name of a variable that has another value after than before; "" where none has."""
    for variable in {**before, **after}:
        a, b = before.get(variable, NOT_THERE), after.get(variable, NOT_THERE)
        if not same(a, b, strict=True):
            return variable.name
    return ""


def _drop(_: torch.Tensor) -> None:
    """In the place of what autograd saves."""


def _never(_: None) -> torch.Tensor:
    raise RuntimeError("a backward within a forward cannot be tried")


def _refuse_iterator(name: str) -> None:
    if name:
        raise _RefusedError(f"its forward may take from the iterator {name!r}")


@contextmanager
def _without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Without the user's hooks on these modules and on all modules. Those stay by which torch
    makes a weight or a DTensor, and by which strata enters a unit."""
    own = [
        (vars(inner), name, hooks)
        for inner in modules
        for name in MODULE_HOOKS
        if (hooks := vars(inner).get(name))
    ]
    everywhere = [(hooks, hooks.copy()) for hooks in GLOBAL_HOOKS]
    try:
        for owner, name, hooks in own:
            owner[name] = OrderedDict((k, h) for k, h in hooks.items() if _is_ours(h))
        for hooks, _ in everywhere:
            hooks.clear()
        yield
    finally:
        for owner, name, hooks in own:
            owner[name] = hooks
        for hooks, before in everywhere:
            hooks.update(before)


def _is_ours(hook: Any) -> bool:
    """Whether torch's or strata's."""
    defined = getattr(hook, "__module__", None) or type(hook).__module__
    return str(defined).startswith(("torch.", "strata._hooks."))


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
            if not same_tensors(a[row], b[row]):
                raise _RefusedError("rows of its output depend on other rows of the batch")
        elif a.shape != b.shape or not same_tensors(a, b):
            raise _RefusedError(f"its output of shape {tuple(a.shape)} depends on the whole batch")


def _cut_outputs(
    trial: _Trial, whole: Arguments, pieces: Iterable[list[torch.Tensor]], batch: int
) -> tuple[bool, ...]:
    """Which tensors of the output are cut with the batch. Raises _RefusedError where that fails."""
    cut_ones: tuple[bool, ...] = ()
    begin = 0
    for piece in pieces:
        part = trial.run(piece).output
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


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and same_tensors(a, b)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within rounding, measured by the values around."""
    if not a.is_floating_point():
        return same_tensors(a, b)
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
