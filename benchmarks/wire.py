"""Two ranks on two machines, as network namespaces of this host, with a network of a set rate
between them: bytes that they send in a step, over those that they must; and steps, as a share of
the longer of computation and network. The step without a limit stands for computation.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from .common import Context, Figure
from .network import Network
from .ranks import WARM_UP_STEPS, training_group

BYTES_TARGET = 1.02
SHARE_TARGET = 0.9
TOKENS = 512
RATIOS = (0.5, 1.0, 2.0)  # of the network's time to that of computation


def run(context: Context) -> Iterator[Figure]:
    """Yields bytes of a step, and steps at three rates."""
    tokens = 64 if context.quick else TOKENS
    rounds = context.rounds
    with (
        Network() as network,
        closing(training_group(context, "strata", tokens, 2, 1, network)) as group,
    ):
        for _ in range(WARM_UP_STEPS):
            group.step()
        # 1. Bytes; and seconds without a limit.
        before = group.ask("wire")
        seconds = [group.step() for _ in range(rounds)]
        sent = _sent(before, group.ask("wire"), 2 * rounds)  # a turn has two steps
        must = _must(before)
        compute = statistics.median(seconds)
        yield Figure("wire", "sent", max(sent["sent"]) / 1e6, "MB", bound=max(must) / 1e6)
        over = max(mine / least for mine, least in zip(sent["sent"], must, strict=True))
        yield Figure("wire", "sent_over_bound", over, "x", BYTES_TARGET, bound=1)
        over = max(mine / least for mine, least in zip(sent["interface"], must, strict=True))
        yield Figure("wire", "interface_over_bound", over, "x", bound=1)
        yield Figure("wire", "step_unlimited", compute, "s")
        # 2. At rates at which the network takes less than computation, as long, and longer.
        for ratio in RATIOS:
            wire = compute * ratio
            network.limit(max(sent["sent"]) / wire)
            context.say(f"network of {max(sent['sent']) / wire / 1e6:.0f} MB/s")
            group.step()
            step = statistics.median([group.step() for _ in range(rounds)])
            bound = max(compute, wire)
            name = f"wire_{ratio:g}_of_compute"
            yield Figure("wire", f"step_{name}", step, "s", bound=bound)
            yield Figure(
                "wire", f"share_{name}", bound / step, "x", SHARE_TARGET, bound=1, better="higher"
            )


def _sent(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], steps: int
) -> dict[str, list[float]]:
    """By rank, in a step."""
    return {
        key: [(late[key] - early[key]) / steps for early, late in zip(before, after, strict=True)]
        for key in ("sent", "interface")
    }


def _must(answers: Sequence[Mapping[str, float]]) -> list[float]:
    """By rank: what the others need of it in a step, and what it has for them."""
    return [answer["lends"] + answer["gradients"] for answer in answers]
