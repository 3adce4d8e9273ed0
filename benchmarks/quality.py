"""What updates that lag, and states that are stored with fewer bits, do to what a model learns:
the final held-out loss of every mode, from the same weights and text. A round is a seed, in which
all modes take turns.

The text is the source of Python's standard library. Seeds differ in weights and in the order of the
text. The held-out loss is taken once, at the end. An excess is the mean over seeds of held-out loss
less that of on_step; the spread is the largest less the smallest of on_step. With pages of 64 KiB,
one worker and the state on the SSD updates take about as long as computation: LockFree does lag.
"""

import statistics
from collections.abc import Iterator, Sequence

import torch

from .common import Context, Figure
from .modes import Mode, lock_free
from .quality_run import FULL, QUICK, Outcome, prepare, train

REFERENCE = Mode("on_step")
IN_BACKWARD = Mode("in_backward", "in_backward")
LOCK_FREE = (lock_free(1), lock_free(2), lock_free(4))
LOSSY = (Mode("bfloat16_state", state_dtype=torch.bfloat16), Mode("8bit_state", state_dtype="8bit"))
MODES = (REFERENCE, IN_BACKWARD, *LOCK_FREE, *LOSSY)


def figures(outcomes: Sequence[Outcome]) -> Iterator[Figure]:
    """What the runs say. REQUIRES: every mode ran every seed, in the same order."""
    by_mode = {m.name: [o for o in outcomes if o.mode == m.name] for m in MODES}
    reference = by_mode[REFERENCE.name]
    losses = [outcome.held_out for outcome in reference]
    # One seed has no spread to compare with.
    spread = max(losses) - min(losses) if len(losses) > 1 else None
    for name, runs in by_mode.items():
        mean = statistics.fmean(outcome.held_out for outcome in runs)
        yield Figure("quality", f"{name}_held_out", mean, "nats")
    if spread is not None:
        yield Figure("quality", "spread_of_seeds", spread, "nats")
    pairs = zip(by_mode[IN_BACKWARD.name], reference, strict=True)
    differing = sum(not ours.same_as(theirs) for ours, theirs in pairs)
    yield Figure("quality", "in_backward_runs_that_differ", differing, "runs", target=0)
    for mode in (*LOCK_FREE, *LOSSY):
        pairs = zip(by_mode[mode.name], reference, strict=True)
        excess = statistics.fmean(ours.held_out - theirs.held_out for ours, theirs in pairs)
        target = spread if mode == LOCK_FREE[0] else None
        yield Figure("quality", f"{mode.name}_excess", excess, "nats", target)
    for mode in LOCK_FREE:
        histograms = [outcome.staleness for outcome in by_mode[mode.name]]
        forwards = max(1, sum(map(sum, histograms)))
        for age in range(mode.staleness + 1):
            percent = 100 * sum(h[age] for h in histograms if age < len(h)) / forwards
            yield Figure("quality", f"{mode.name}_forwards_{age}_steps_behind", percent, "%")
    seconds = statistics.fmean(outcome.seconds for outcome in outcomes)
    yield Figure("quality", "seconds_of_a_run", seconds, "s")


def run(context: Context) -> Iterator[Figure]:
    """Yields held-out losses, what each mode loses against on_step, and how far updates lagged."""
    shape = QUICK if context.quick else FULL
    outcomes: list[Outcome] = []
    with context.scratch() as folder:
        text = prepare(shape)
        for turn in range(context.rounds):
            seed = context.seed + turn
            for mode in MODES:
                outcome = train(mode, seed, shape, text, folder)
                outcomes.append(outcome)
                context.say(
                    f"seed {seed}, {mode.name}: {outcome.losses[-1]:.4f}, held out "
                    f"{outcome.held_out:.4f}, {outcome.seconds:.0f} s, lag {outcome.staleness}"
                )
    yield from figures(outcomes)
