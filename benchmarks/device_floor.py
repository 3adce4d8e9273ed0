"""The smallest device budget at which a 2,048-token step stays within 1.10 times plain PyTorch's,
as a share of what plain PyTorch holds: parameters, gradients, moments (all bfloat16), activations.
Budgets are tried from the smallest up; each takes turns with plain PyTorch, and what the device
held is measured.
"""

from collections.abc import Iterator
from functools import partial

import torch

from .common import Context, Figure, median_ratio, seconds_of, take_turns
from .models import llama_166m_or_small, tokens
from .planned import Planned, pytorch_peak
from .sides import Plain, everything_resident, steady_step

TOKENS = 2048
SLOWDOWN_MAX = 1.10
SHARE_MAX = 0.15
SHARES = (0.08, 0.10, 0.115, 0.13, 0.14, 0.15, 0.175, 0.20, 0.25, 0.35, 0.5, 1.0)
PLAIN_BYTES = 8  # a parameter, its gradient and two moments
GIB = 1 << 30


def run(context: Context) -> Iterator[Figure]:
    """Yields the share, the slow-down there, and what was measured on the device."""
    from strata._errors import StrataError

    def model() -> torch.nn.Module:
        return llama_166m_or_small(context.quick, context.seed)

    batch = tokens(128 if context.quick else TOKENS, context.seed)
    plain = Plain(model(), batch)
    parameters = sum(p.numel() for p in plain.model.parameters())
    plain.step()
    held = PLAIN_BYTES * parameters + pytorch_peak(plain)
    yield Figure("device-floor", "plain_bytes", held, "B")
    for share in SHARES:
        budget = int(share * held)
        memory = {**everything_resident(parameters), "device": budget}
        memory["host"] += 4 * GIB  # for what is swapped
        side: Planned | None = None
        try:
            side = Planned(model(), batch, memory)
            side.settle()
            context.say(f"{share:.1%}: {side.planning.describe()}")
            turns = {
                "plain": partial(seconds_of, plain.step),
                "planned": partial(steady_step, side),
            }
            taken = take_turns(turns, context.rounds, context.say)
            slowdown = median_ratio(taken["planned"], taken["plain"])
            peak = side.device_peak()
        except StrataError as error:
            context.say(f"{share:.1%}: {error}")
            continue
        finally:
            if side is not None:
                side.close()
        context.say(
            f"{share:.1%}: {slowdown:.3f} x plain PyTorch, {peak / budget:.0%} of the budget"
        )
        if slowdown <= SLOWDOWN_MAX and peak <= budget:
            yield Figure("device-floor", "share", share, "ratio", SHARE_MAX)
            yield Figure("device-floor", "slowdown", slowdown, "ratio", SLOWDOWN_MAX, 1.0)
            yield Figure("device-floor", "device_peak_bytes", peak, "B", budget)
            return
    yield Figure("device-floor", "share", float("inf"), "ratio", SHARE_MAX)
