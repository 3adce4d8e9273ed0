"""What a base in fewer bits does to what adapters learn: held-out loss of LoRA over the same base
in bfloat16, int8 and NF4. A round is a seed.

The text is that of `quality`, and the model as large (11 M parameters), with rows that are whole
blocks of 64, as int8 needs. A base learns from one half of the text; adapters learn from the other
half, as many steps, over each form of the same base and from the same first values. An excess is
the mean over seeds of held-out loss less that over bfloat16.
"""

import copy
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from . import quality_run
from .common import Context, Figure
from .modes import Mode
from .qlora import with_adapters
from .quality_run import Shape, Text, evaluate, learn, open_side, prepare
from .sides import Paged, everything_resident

FULL = replace(quality_run.FULL, hidden=512, layers=3)
QUICK = replace(quality_run.QUICK, hidden=512, layers=1)
FORMS = {"bfloat16": "as-is", "int8": "int8", "nf4": "nf4", "nf4_double": "nf4-double"}
WITHIN = {"nf4": 0.05}  # nats of bfloat16
RATE = 2e-3


def base_of(seed: int, shape: Shape, windows: np.ndarray[Any, Any], folder: Path) -> nn.Module:
    """A model that has learned from windows."""
    import strata

    side = open_side(Mode("on_step"), seed, shape, folder)
    try:
        learn(side, windows, shape.steps)
    except BaseException:
        side.close()
        raise
    return strata.unwrap(side.model)  # which closes it


def adapted(
    base: nn.Module, form: str, seed: int, windows: Any, held_out: Any, steps: int
) -> float:
    """Held-out loss behind so many steps of adapters."""
    torch.manual_seed(seed)
    model = with_adapters(copy.deepcopy(base).train())
    memory = everything_resident(sum(p.numel() for p in model.parameters()))
    options = {"frozen": form, "dtype": torch.bfloat16}
    side = Paged(model, torch.empty(0), memory, None, options, lr=RATE)
    try:
        learn(side, windows, steps)
        side.synchronize()
        return evaluate(side.model, held_out)
    finally:
        side.close()


def one_seed(
    seed: int, shape: Shape, text: Text, context: Context, folder: Path
) -> dict[str, float]:
    """By form: held-out loss, of text that neither base nor adapters have seen."""
    order = np.random.default_rng(seed).permutation(len(text.training))
    ours, theirs = np.array_split(text.training[order], 2)
    held_out = text.held_out[: shape.held_out_windows]
    base = base_of(seed, shape, ours, folder)
    context.say(f"seed {seed}, base: held out {evaluate(base, held_out):.4f}")
    found = {}
    for name, form in FORMS.items():
        found[name] = adapted(base, form, seed, theirs, held_out, shape.steps)
        context.say(f"seed {seed}, {name}: held out {found[name]:.4f}")
    return found


def run(context: Context) -> Iterator[Figure]:
    """Yields held-out losses, and what each form loses against bfloat16."""
    shape = QUICK if context.quick else FULL
    with context.scratch() as folder:
        text = prepare(shape)
        seeds = range(context.seed, context.seed + context.rounds)
        found = [one_seed(seed, shape, text, context, folder) for seed in seeds]
    for name in FORMS:
        mean = statistics.fmean(losses[name] for losses in found)
        yield Figure("qlora-quality", f"{name}_held_out", mean, "nats")
    for name in FORMS:
        if name != "bfloat16":
            excess = statistics.fmean(losses[name] - losses["bfloat16"] for losses in found)
            yield Figure("qlora-quality", f"{name}_excess", excess, "nats", WITHIN.get(name))
