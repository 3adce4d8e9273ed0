"""Ranks of this machine that share one host tier: a step of two ranks with a thread each over a
step of one process with two, for the same global batch; FSDP2 with two ranks beside them; and the
memory of one, two and four. Sides take turns.
"""

import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from .common import Context, Figure, median_ratio, take_turns
from .network import Network
from .peers.child import Child

TARGETS = {2048: 1.05, 128: 1.3}  # of the step, by tokens of the global batch
FSDP2_TARGET = 2.0  # how much faster, at 128 tokens
HOST_TARGET, PROCESS_TARGET = 1.05, 1.1
SEQUENCES = 4  # of the global batch: each rank has as many
WARM_UP_STEPS = 3


class Group:
    """The ranks of one side, as processes that are asked together."""

    def __init__(
        self,
        context: Context,
        side: str,
        tokens: int,
        ranks: int,
        threads: int,
        network: Network | None = None,
    ) -> None:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = str(any_port.getsockname()[1])
        command = [
            *(sys.executable, "-m", "benchmarks.ranks_child", side),
            *(f"--tokens={tokens}", f"--seed={context.seed}", f"--sequences={SEQUENCES}"),
            *(f"--threads={threads}", *(["--quick"] if context.quick else [])),
        ]

        def start(rank: int) -> Child:
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if network is not None:
                return Child([*network.inside(rank), *command], env | network.env(rank))
            return Child(command, env)

        self._pool = ThreadPoolExecutor(ranks)
        self._children = list(self._pool.map(start, range(ranks)))

    def ask(self, command: str) -> Sequence[Mapping[str, float]]:
        """What each rank answers."""
        return list(self._pool.map(lambda child: child.ask(command), self._children))

    def step(self) -> float:
        """Seconds of the slowest rank."""
        return max(float(answer["seconds"]) for answer in self.ask("step"))

    def close(self) -> None:
        """Lets all end."""
        list(self._pool.map(lambda child: child.close(), self._children))
        self._pool.shutdown()


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of steps and bytes of memory, and their ratios."""
    for tokens, target in {64: 0.0}.items() if context.quick else TARGETS.items():
        yield from _steps(context, tokens, target or None)
    yield from _memory(context)


def _steps(context: Context, tokens: int, target: float | None) -> Iterator[Figure]:
    context.say(f"{tokens} tokens")
    sides = {"one": ("strata", 1, 2), "two": ("strata", 2, 1)}
    if tokens < 1024:
        sides["fsdp2"] = ("fsdp2", 2, 1)
    with ExitStack() as stack:
        steps: dict[str, Callable[[], float]] = {}
        for name, (side, ranks, threads) in sides.items():
            group = stack.enter_context(closing(Group(context, side, tokens, ranks, threads)))
            for _ in range(WARM_UP_STEPS):
                group.step()
            steps[name] = group.step
        taken = take_turns(steps, context.rounds, context.say)
    for name, seconds in taken.items():
        yield Figure("ranks", f"{name}_{tokens}_tokens", statistics.median(seconds), "s")
    ratio = median_ratio(taken["two"], taken["one"])
    yield Figure("ranks", f"two_over_one_{tokens}_tokens", ratio, "x", target, bound=1)
    if "fsdp2" in taken:
        speed = median_ratio(taken["fsdp2"], taken["two"])
        wanted = None if target is None else FSDP2_TARGET
        yield Figure(
            "ranks", f"speed_over_fsdp2_{tokens}_tokens", speed, "x", wanted, better="higher"
        )


def _memory(context: Context) -> Iterator[Figure]:
    """Bytes of all ranks together, by their number."""
    host: dict[int, float] = {}
    process: dict[int, float] = {}
    for ranks in (1, 2, 4):
        with closing(Group(context, "strata", 128, ranks, 1)) as group:
            for _ in range(WARM_UP_STEPS):
                group.step()
            answers = group.ask("memory")
        host[ranks] = sum(answer["host"] for answer in answers)
        process[ranks] = sum(answer["process"] for answer in answers)
        yield Figure("ranks", f"host_tier_{ranks}", host[ranks] / 1e6, "MB")
        yield Figure("ranks", f"processes_{ranks}", process[ranks] / 1e6, "MB")
    for ranks in (2, 4):
        full = not context.quick
        ratio = host[ranks] / host[1]
        yield Figure(
            "ranks", f"host_tier_{ranks}_over_1", ratio, "x", HOST_TARGET if full else None
        )
        ratio = process[ranks] / process[1]
        yield Figure(
            "ranks", f"processes_{ranks}_over_1", ratio, "x", PROCESS_TARGET if full else None
        )
