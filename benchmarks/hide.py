"""What updates add to a step of 2,048 tokens with the optimizer state on the SSD: every mode
against a step that updates nothing, all taking turns in one process. Each mode has the host memory
that it needs for parameters and gradients, and none for its state: 2 bytes a parameter in_backward,
4 on_step, 6 LockFree, and what passes through. `…_host` and `…_ssd` are what was claimed. The step
that updates nothing lands its gradients like any other, and forgets them.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from .common import MIB, BenchError, Context, Figure, median_ratio, take_turns
from .models import llama_166m_or_small, tokens
from .modes import Mode, lock_free
from .sides import Paged, steady_step

TOKENS = 2048
ON_STEP = Mode("on_step")
TARGETS = {ON_STEP: 1.10, Mode("in_backward", "in_backward"): 1.05, lock_free(1): 1.05}


class NotUpdated(Paged):
    """Forward and backward alone: its gradients land, and are forgotten."""

    def step(self) -> float:
        """Forward and backward. Returns the loss."""
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.zero_grad()
        # There is nothing to update now; the call ends the step, so that the next one is foreseen.
        self.optimizer.step()
        return float(loss.detach())


def run(context: Context) -> Iterator[Figure]:
    """Yields every side's seconds and host memory, and the ratio of each mode to no update."""

    def model() -> torch.nn.Module:
        return llama_166m_or_small(context.quick, context.seed, (256, 4))

    batch = tokens(64 if context.quick else TOKENS, context.seed)
    parameters = sum(p.numel() for p in model().parameters())
    passing = 16 * MIB if context.quick else None
    sides: dict[str, Paged] = {}
    with context.scratch() as folder:
        try:
            budgets = ON_STEP.state_on_ssd(parameters, passing)
            sides["no_update"] = NotUpdated(model(), batch, budgets, folder, ON_STEP.options())
            for mode in TARGETS:
                budgets = mode.state_on_ssd(parameters, passing)
                sides[mode.name] = Paged(model(), batch, budgets, folder, mode.options())
            for side in sides.values():
                side.step()  # the first step records, allocates and compiles
            turns = {name: partial(steady_step, side) for name, side in sides.items()}
            taken = take_turns(turns, context.rounds, context.say)
            stats = {name: side.session.stats() for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.close()
    if stats["no_update"]["chunks_updated"] != 0:
        raise BenchError("the side without updates has updated parameters: nothing to compare with")
    for name, values in taken.items():
        yield Figure("hide", f"{name}_seconds", statistics.median(values), "s")
        yield Figure("hide", f"{name}_host", stats[name]["host_bytes"] / MIB, "MiB")
        yield Figure("hide", f"{name}_ssd", stats[name]["ssd_bytes"] / MIB, "MiB")
    for mode, target in TARGETS.items():
        ratio = median_ratio(taken[mode.name], taken["no_update"])
        yield Figure("hide", f"{mode.name}_over_no_update", ratio, "ratio", target, bound=1.0)
