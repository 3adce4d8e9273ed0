"""Whether all ranks are to train the same: asked ahead of everything that takes memory.

    check_alike(ranks, options, check, model)     # every rank; all of them raise, or none

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
from .sharding import Sharding
from .sizes import format_size, parse_budgets, parse_size

if TYPE_CHECKING:
    from .options import Options
    from .ranks import Ranks

SHARED_TIERS = ("host", "ssd")  # whose budgets are the machine's, and not each rank's
SAME_OPTIONS = (
    *("dtype", "update", "state_dtype", "max_grad_norm", "max_unit_norm", "skip_nonfinite"),
    *("snapshots", "rank_gradients", "rank_gathers", "rank_sums"),
)


def check_alike(
    ranks: Ranks, options: Options, check: Callable[[], dict[str, str]], model: nn.Module
) -> None:
    """Runs `check`, and compares the ranks. Raises what it raises, and on the other ranks
    ValueError; where ranks differ, ValueError with the first that does, and in what."""
    try:
        facts = check()
        options.check()
        said: dict[str, Any] = {"facts": _facts(options) | facts, "error": ""}
        parameters = _parameters(model)
    except Exception as error:
        ranks.hear({"error": f"{type(error).__name__}: {error!s:.1000}"})
        raise
    said["parameters"] = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()
    heard = ranks.hear(said)
    for rank, other in enumerate(heard):
        if other["error"]:
            raise ValueError(f"strata.wrap() was refused on rank {rank}: {other['error']}")
    for rank, other in enumerate(heard):
        if other["facts"] != heard[0]["facts"]:
            raise ValueError(_refusal(_different(heard[0]["facts"], other["facts"], rank)))
    if any(other["parameters"] != heard[0]["parameters"] for other in heard):
        of = ranks.hear(parameters)
        rank = next(i for i, other in enumerate(of) if other != of[0])
        raise ValueError(_refusal(_different(dict(of[0]), dict(of[rank]), rank)))


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


def _parameters(model: nn.Module) -> list[tuple[str, str]]:
    """Names, and what they are."""
    return [
        (
            f"parameter {name!r}",
            f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}"
            + " frozen" * (not p.requires_grad)
            + (Sharding.of(p).said() if is_dtensor(p) else ""),  # type: ignore[arg-type]
        )
        for name, p in model.named_parameters()
    ]


def _different(first: dict[str, str], other: dict[str, str], rank: int) -> list[str]:
    """What is not the same on rank 0 and on `rank`, a sentence for each."""
    none = "missing"
    return [
        f"{what} is {first.get(what, none)} on rank 0 and {other.get(what, none)} on rank {rank}"
        for what in {**first, **other}
        if first.get(what) != other.get(what)
    ] or [f"parameters come in another order on rank {rank} than on rank 0"]


def _refusal(differences: list[str]) -> str:
    more = len(differences) - 3
    text = "; ".join(differences[:3]) + (f"; and {more} differences more" if more > 0 else "")
    return f"ranks cannot train together: {text}. All must be started alike"
