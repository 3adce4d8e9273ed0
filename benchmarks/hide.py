"""What updates add to a step of 2,048 tokens with the optimizer state on the SSD: every mode
against a step that updates nothing, all taking turns in one process. Each mode has the host memory
that it needs for parameters and gradients, and none for its state: 2 bytes a parameter in_backward,
4 on_step, 6 LockFree, and what passes through. `…_host` and `…_ssd` are what was claimed. The step
that updates nothing lands its gradients like any other, and forgets them.

And steps of 128 tokens, which compute little: how many a second under LockFree of more and more
steps, beside those under LockFree(4) with all state in host memory, which no SSD holds up.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from .common import MIB, BenchError, Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama_166m_or_small, tokens
from .modes import Mode, lock_free
from .sides import Paged, steady_step

TOKENS, FEW_TOKENS = 2048, 128
ON_STEP = Mode("on_step")
TARGETS = {ON_STEP: 1.10, Mode("in_backward", "in_backward"): 1.05, lock_free(1): 1.05}
LAGS = (0, 1, 2, 4)  # steps
WITHOUT_SSD = "without_ssd"
SHARE_MIN = 0.95  # of the steps without an SSD
# More than any lag: then as many updates end as begin, and gradients merge as they go on to.
STEPS_BEFORE, STEPS = max(LAGS) + 2, 12


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
    """Yields every side's seconds and host memory, and the ratio of each mode to no update; steps
    a second under LockFree, and their share of those without an SSD."""
    yield from _hidden(context)
    yield from _lagging(context)


def _model(context: Context) -> torch.nn.Module:
    return llama_166m_or_small(context.quick, context.seed, (256, 4))


def _hidden(context: Context) -> Iterator[Figure]:
    batch = tokens(64 if context.quick else TOKENS, context.seed)
    parameters = sum(p.numel() for p in _model(context).parameters())
    passing = 16 * MIB if context.quick else None
    sides: dict[str, Paged] = {}
    with context.scratch() as folder:
        try:
            budgets = ON_STEP.state_on_ssd(parameters, passing)
            sides["no_update"] = NotUpdated(
                _model(context), batch, budgets, folder, ON_STEP.options()
            )
            for mode in TARGETS:
                budgets = mode.state_on_ssd(parameters, passing)
                sides[mode.name] = Paged(_model(context), batch, budgets, folder, mode.options())
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


def _lagging(context: Context) -> Iterator[Figure]:
    batch = tokens(FEW_TOKENS, context.seed)
    parameters = sum(p.numel() for p in _model(context).parameters())
    passing = 16 * MIB if context.quick else None
    before, steps = (1, 2) if context.quick else (STEPS_BEFORE, STEPS)
    most = lock_free(max(LAGS))

    def turn(side: Paged) -> float:
        """Seconds of a step in the middle of a run: updates run on after it, and into it."""
        for _ in range(before):
            side.step()
        seconds = seconds_of(lambda: [side.step() for _ in range(steps)])
        side.synchronize()
        return seconds / steps

    sides: dict[str, Paged] = {}
    with context.scratch() as folder:
        try:
            for mode in map(lock_free, LAGS):
                budgets = mode.state_on_ssd(parameters, passing)
                sides[mode.name] = Paged(_model(context), batch, budgets, folder, mode.options())
            budgets = most.state_in_host(parameters)
            sides[WITHOUT_SSD] = Paged(_model(context), batch, budgets, None, most.options())
            for side in sides.values():
                side.step()
            turns = {name: partial(turn, side) for name, side in sides.items()}
            taken = take_turns(turns, context.rounds, context.say)
        finally:
            for side in sides.values():
                side.close()
    for name, seconds in taken.items():
        rate = 1 / statistics.median(seconds)
        yield Figure("hide", f"{name}_steps_per_second", rate, "1/s", better="higher")
    for mode in map(lock_free, LAGS):
        share = median_ratio(taken[WITHOUT_SSD], taken[mode.name])
        metric, least = f"{mode.name}_rate_over_{WITHOUT_SSD}", SHARE_MIN if mode == most else None
        yield Figure("hide", metric, share, "ratio", least, bound=1.0, better="higher")
