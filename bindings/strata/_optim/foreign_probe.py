"""Whether an optimizer class can be run on pieces of parameters, and what it keeps between steps.

    kept = probe(optimizer, optimizer.param_groups[0])       # raises TypeError and says why not
    kept.moments                                             # ("square_avg",)

Found by trying: a few steps on a small tensor, whole and in pieces, must give the same bits, with
the state of a piece put together anew before every step, as it is when it rests in pages.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch

STEPS = 3
SHAPE = (7, 67)  # of the tensor to try on: two dimensions, and an odd number of elements
CUT = 256  # pieces of parameters begin at multiples of 64
MOMENTS_MAX = 2
# Ways to compute the same on many tensors at once, or on a device.
OFF = ("foreach", "fused", "capturable")

State = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """The entries of the state of a parameter."""

    moments: tuple[str, ...]  # of the parameter's shape, float32
    scalars: tuple[str, ...]  # numbers that follow from the step alone


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's hyperparameters as they are now, to run pieces with."""
    options = {}
    for name, value in group.items():
        if name != "params":
            options[name] = value.detach().clone() if torch.is_tensor(value) else value
    return options | {name: False for name in OFF if name in options}


def replica(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and with the same attributes, without parameters or hooks."""
    kind = type(optimizer)
    made = kind.__new__(kind)
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's wrapper around the step of the original
    made.state = defaultdict(dict)
    made.param_groups = []
    made._optimizer_step_pre_hooks = OrderedDict()
    made._optimizer_step_post_hooks = OrderedDict()
    return made


def run_step(
    rule: torch.optim.Optimizer,
    options: dict[str, Any],
    values: torch.Tensor,
    grad: torch.Tensor,
    state: State,
) -> State:
    """One step of a `replica()` on these values, in place. Returns the new state."""
    values.requires_grad_(True).grad = grad
    rule.param_groups = [{**options, "params": [values]}]
    rule.state = defaultdict(dict, {values: state} if state else {})
    with torch.no_grad():
        rule.step()
    return dict(rule.state.get(values, {}))


def copy_scalars(state: State, names: tuple[str, ...]) -> State:
    """Those entries, free to be changed in place."""
    return {n: state[n].clone() if torch.is_tensor(state[n]) else state[n] for n in names}


def probe(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Kept:
    """What the optimizer keeps for parameters of this group. Raises TypeError with the reason where
    it cannot be run on pieces."""
    name = type(optimizer).__name__
    options = options_of(group)
    random = torch.Generator().manual_seed(5)
    values = torch.randn(SHAPE, generator=random, device="cpu")
    grads = [torch.randn(SHAPE, generator=random, device="cpu") for _ in range(STEPS)]
    try:
        whole, state = _run(optimizer, options, values, grads, anew=False)
        kept = _entries(name, state)
        flat = [grad.reshape(-1) for grad in grads]
        begin, end = (
            _run(optimizer, options, values.reshape(-1)[part], [g[part] for g in flat], anew=True)
            for part in (slice(CUT), slice(CUT, None))
        )
    except _RefusedError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise _refusal(name, f"it cannot update part of a parameter by itself ({why})") from error
    for entry in kept.scalars:
        if not _same(begin[1][entry], state[entry]) or not _same(end[1][entry], state[entry]):
            raise _refusal(name, f"{entry!r} of its state depends on the values of the parameter")
    pairs = [(whole, begin[0], end[0])]
    pairs += [(state[m], begin[1][m], end[1][m]) for m in kept.moments]
    for one, first, rest in pairs:
        if not _same(one.detach().reshape(-1), torch.cat([first.detach(), rest.detach()])):
            raise _refusal(
                name,
                "a parameter updated in pieces comes out different, so the update of an element "
                "depends on other elements, or on what is not in its state",
            )
    return kept


class _RefusedError(TypeError):
    """The optimizer cannot be run on pieces."""


def _refusal(name: str, why: str) -> _RefusedError:
    return _RefusedError(
        f"optimizer {name} is not supported: {why}. strata runs optimizers that update every "
        "element by itself"
    )


def _run(
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    values: torch.Tensor,
    grads: list[torch.Tensor],
    anew: bool,
) -> tuple[torch.Tensor, State]:
    """Some steps, as plain PyTorch makes them. `anew`: as strata does, each by a new replica and
    from a state that was put together anew."""
    rule, values, state = replica(optimizer), values.clone(), dict[str, Any]()
    for grad in grads:
        if anew:
            rule, state = replica(optimizer), copy_scalars(state, tuple(state))
        state = run_step(rule, options, values, grad.clone(), state)
        changed = [n for n, v in options.items() if not _same(rule.param_groups[0].get(n), v)]
        if changed:
            raise _refusal(
                type(optimizer).__name__,
                f"it keeps {changed[0]!r} in its parameter groups, which are the user's",
            )
    return values, state


def _entries(name: str, state: State) -> Kept:
    moments = [n for n, v in state.items() if torch.is_tensor(v) and v.shape == SHAPE]
    scalars = [n for n in state if n not in moments]
    for entry in moments:
        if state[entry].dtype != torch.float32:
            raise _refusal(name, f"it keeps {entry!r} as {state[entry].dtype}, not as float32")
    if len(moments) > MOMENTS_MAX:
        listed = ", ".join(map(repr, moments))
        raise _refusal(
            name,
            f"it keeps {len(moments)} values for every parameter ({listed}), and there is room for "
            f"{MOMENTS_MAX}; options such as amsgrad or centered add one",
        )
    for entry in scalars:
        value = state[entry]
        if not (
            value.ndim == 0 if torch.is_tensor(value) else isinstance(value, int | float | None)
        ):
            raise _refusal(name, f"{entry!r} of its state is neither a number nor like a parameter")
    return Kept(tuple(moments), tuple(scalars))


def _same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)
