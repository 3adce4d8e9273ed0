"""A training step against DeepSpeed's ZeRO-3 with CPU offload and with NVMe offload: the same
Llama, weights and tokens, in bfloat16, nothing recomputed, the state on the same tier, as many
threads. Every side is a process, so that its memory can be compared; they take turns.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from .common import BenchError, Context, Figure, median_ratio, take_turns
from .models import llama_166m_or_small
from .peers import environment
from .peers.child import Child

PEER, OURS = "deepspeed", "on_step"  # both are exact
WARM_UP_STEPS = 2
# What the losses of two sides may differ by, relatively: they round at different places.
LOSS_MARGIN = 0.01
SPEED_TARGETS = {
    ("host", 128): 2.5,
    ("ssd", 128): 1.6,
    ("host", 2048): 1.15,
    ("ssd", 2048): 1.15,
}
MEMORY_TARGET = 1 / 3


class Setting:
    """One tier and batch, with both sides as children."""

    def __init__(self, context: Context, folder: Path, tier: str, tokens: int) -> None:
        self._threads = len(os.sched_getaffinity(0))
        self._folder = folder
        self._arguments = [
            f"--tier={tier}",
            f"--tokens={tokens}",
            f"--seed={context.seed}",
            f"--threads={self._threads}",
            f"--weights={folder / 'weights'}",
            f"--room={4 if context.quick else 1}",  # a quick model's quarter is below its embedding
        ]

    def open(self, name: str) -> Child:
        """Starts a side: a peer, or an update mode of strata."""
        files = self._folder / name
        files.mkdir(exist_ok=True)
        python = str(environment.PYTHON if name == PEER else sys.executable)
        side = [name] if name == PEER else ["strata", f"--update={name}"]
        command = [python, "-m", "benchmarks.peers.training", *side, *self._arguments]
        return Child([*command, f"--folder={files}"], environment.variables(self._threads))


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds and peak bytes of every side in every setting, and their ratios."""
    environment.python(context)
    settings = {("host", 64): 1.0, ("ssd", 64): 1.0} if context.quick else SPEED_TARGETS
    for (tier, tokens), target in settings.items():
        context.say(f"{tokens} tokens, state on {tier}")
        with context.scratch() as folder:
            save_model(context, folder / "weights")
            setting = Setting(context, folder, tier, tokens)
            taken, peaks = measure(setting, context)
        where = f"{tier}_{tokens}_tokens"
        yield from figures(where, taken, peaks, None if context.quick else target)


def save_model(context: Context, folder: Path) -> None:
    """Writes the weights that every side starts from."""
    model = llama_166m_or_small(context.quick, context.seed, (256, 2))
    model.save_pretrained(folder)  # type: ignore[operator]


def measure(
    setting: Setting, context: Context
) -> tuple[Mapping[str, list[float]], Mapping[str, int]]:
    """(seconds of every turn, peak bytes) by side."""
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name in (PEER, OURS):
            children[name] = stack.enter_context(closing(setting.open(name)))
            losses = [float(children[name].ask("warm")["loss"]) for _ in range(WARM_UP_STEPS)]
            context.say(f"{name}: first losses {', '.join(f'{loss:.3f}' for loss in losses)}")
            if name == PEER:
                expected = losses
            elif not all(map(close, losses, expected)):
                raise BenchError(f"{name} does not train what DeepSpeed trains")
        sides = {name: asking(child) for name, child in children.items()}
        taken = take_turns(sides, context.rounds, context.say)
        peaks = {name: int(child.ask("peak")["bytes"]) for name, child in children.items()}
    return taken, peaks


def close(loss: float, expected: float) -> bool:
    """Whether two losses are those of the same step."""
    return math.isclose(loss, expected, rel_tol=LOSS_MARGIN)


def asking(child: Child) -> Callable[[], float]:
    """Seconds of a step of a child."""
    return lambda: float(child.ask("step")["seconds"])


def figures(
    where: str, taken: Mapping[str, list[float]], peaks: Mapping[str, int], target: float | None
) -> Iterator[Figure]:
    """What one setting says."""
    bench = "vs-deepspeed"
    for name, seconds in taken.items():
        yield Figure(bench, f"{name}_{where}_seconds", statistics.median(seconds), "s")
        yield Figure(bench, f"{name}_{where}_peak", peaks[name] / 1e6, "MB")
    speed = median_ratio(taken[PEER], taken[OURS])
    yield Figure(bench, f"{OURS}_{where}_speed", speed, "ratio", target, better="higher")
    memory_target = None if target is None else MEMORY_TARGET
    memory = peaks[OURS] / peaks[PEER]
    yield Figure(bench, f"{OURS}_{where}_memory", memory, "ratio", memory_target)
