"""Whether all ranks are to train the same: asked ahead of everything that takes memory.

    check_alike(ranks, options, check, model)     # every rank; all of them raise, or none
    check_fitted(ranks, config, tiled)            # likewise, once each knows how the model fits

`check` raises for what cannot be trained at all, and says by name what else is to be the same.

What differs is said by rank, with both values. What only shows later (learning rates, the moments
at which ranks do things) the core compares at step().

Format. Each rank says a JSON object, by Ranks.hear().
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _core
from .._torch_compat import is_dtensor
from .choices import HOST
from .ranks import all_or_none
from .sharding import Sharding
from .sizes import format_size, parse_budgets, parse_size

if TYPE_CHECKING:
    from .._core import Config
    from .options import Options
    from .ranks import Ranks

DIGITS = 16  # of a digest that people see
SHARED_TIERS = ("host", "ssd")  # whose budgets are the machine's, and not each rank's
SAME_OPTIONS = (
    *("dtype", "update", "state_dtype", "max_grad_norm", "max_unit_norm", "skip_nonfinite"),
    *("snapshots", "rank_gradients"),
)


def check_alike(
    ranks: Ranks, options: Options, check: Callable[[], dict[str, str]], model: nn.Module
) -> None:
    """Runs `check`, and compares the ranks. Raises what it raises, and on the other ranks
    ValueError; where ranks differ, ValueError with the first that does, and in what."""
    with all_or_none(ranks):
        facts = check()
        options.check()
        facts = _facts(options) | facts
        tensors = _tensors(model)
    heard = ranks.hear({"facts": facts, "tensors": _digest(tensors)})
    _refuse_different([of["facts"] for of in heard])
    if any(other["tensors"] != heard[0]["tensors"] for other in heard):
        of = ranks.hear(tensors)
        rank = next(i for i, other in enumerate(of) if other != of[0])
        raise ValueError(_refusal(_different(dict(of[0]), dict(of[rank]), rank)))


def check_fitted(ranks: Ranks, config: Config, tiled: int) -> None:
    """Compares what became of the model on each rank. `tiled`: layers that are cut into tiles."""
    units = [(param["unit"], param["name"]) for param in config["params"]]
    groups = [param["group"] for param in config["params"]]
    forms = [param.get("stored") for param in config["params"]]
    facts = {
        "the number of layers in tiles, which memory['device'] asks for,": str(tiled),
        "the page size, which budgets ask for,": format_size(config["page_bytes"]),
        "the number of units": str(len(config["units"])),
        "what computes": HOST if config["device"] == HOST else "a GPU",
        "units=": _digest(units)[:DIGITS],
        "the optimizer": " ".join(group["rule"] for group in config["groups"]),
        "param_groups of the optimizer": _digest(groups)[:DIGITS],
        "frozen=": _digest(forms)[:DIGITS],
    }
    _refuse_different(ranks.hear(facts))


def _refuse_different(facts: list[dict[str, str]]) -> None:
    """Raises ValueError for the first rank that says something else than rank 0."""
    for rank, other in enumerate(facts):
        if other != facts[0]:
            raise ValueError(_refusal(_different(facts[0], other, rank)))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def _facts(options: Options) -> dict[str, str]:
    """By what it is called: values for people."""
    budgets = parse_budgets(options.memory)
    page = options.page_size
    return {
        "the version of strata": _core.__version__,
        "the version of torch": torch.__version__,
        **{
            f"memory[{tier!r}], which is the machine's,": format_size(budgets[tier])
            if tier in budgets
            else "not given"
            for tier in SHARED_TIERS
        },
        "page_size": page if page == "auto" else format_size(parse_size(page)),
        "ssd_path": f"{len(options.ssd_paths())} folders",
        **{name: str(getattr(options, name)) for name in SAME_OPTIONS},
    }


def _tensors(model: nn.Module) -> list[tuple[str, str]]:
    """Names of parameters and buffers, and what they are."""
    parameters = [
        (
            f"parameter {name!r}",
            _said(p)
            + " frozen" * (not p.requires_grad)
            + (Sharding.of(p).said() if is_dtensor(p) else ""),  # type: ignore[arg-type]
        )
        for name, p in model.named_parameters()
    ]
    return parameters + [(f"buffer {name!r}", _said(b)) for name, b in model.named_buffers()]


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _different(first: dict[str, str], other: dict[str, str], rank: int) -> list[str]:
    """What is not the same on rank 0 and on `rank`, a sentence for each."""
    none = "missing"
    return [
        f"{what} is {first.get(what, none)} on rank 0 and {other.get(what, none)} on rank {rank}"
        for what in {**first, **other}
        if first.get(what) != other.get(what)
    ] or [f"parameters or buffers come in another order on rank {rank} than on rank 0"]


def _refusal(differences: list[str]) -> str:
    more = len(differences) - 3
    text = "; ".join(differences[:3]) + (f"; and {more} differences more" if more > 0 else "")
    return f"ranks cannot train together: {text}. All must be started alike"
