"""Ranks of this machine that share one host tier: a step of two ranks with a thread each over a
step of one process with two, for the same global batch; FSDP2, and DeepSpeed's ZeRO-3, with two
ranks beside them; the memory of one, two and four, and what a step of theirs moves to and from the
SSD. Sides take turns.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from .common import Context, Figure, median_ratio, take_turns
from .peers import environment
from .rank_group import Group

TARGETS = {2048: 1.05, 128: 1.3}  # of the step, by tokens of the global batch
PEERS = {"fsdp2": 2.0, "deepspeed": None}  # how much faster, at 128 tokens
SETTINGS = ("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")  # of DeepSpeed's environment
HOST_TARGET, PROCESS_TARGET = 1.05, 1.1
SSD_TARGET = 1.02
SEQUENCES = 4  # of the global batch: each rank has as many
WARM_UP_STEPS = 3
SSD_TURNS = 3
STEPS_OF_A_TURN = 2  # of steady_step()


def training_group(
    context: Context,
    side: str,
    tokens: int,
    ranks: int,
    threads: int,
    ssd: Path | None = None,
) -> Group:
    """Ranks that train a Llama by strata or a peer. `ssd`: a folder
    where the state rests, in place of host memory."""
    arguments = [
        *(side, f"--tokens={tokens}", f"--seed={context.seed}", f"--sequences={SEQUENCES}"),
        *(f"--threads={threads}", *(["--quick"] if context.quick else [])),
        *([] if ssd is None else [f"--ssd={ssd}"]),
    ]
    if side == "deepspeed":
        python = environment.python(context)
        own = environment.variables(threads)
        taken = {name: own[name] for name in (*SETTINGS, "PATH", "PYTHONPATH")}
        env = {**taken, "LOCAL_SIZE": str(ranks)}
        return Group(
            "benchmarks.ranks_child", arguments, ranks, threads, lambda rank: env, python=python
        )
    return Group("benchmarks.ranks_child", arguments, ranks, threads)


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of steps, bytes of memory and of the SSD, and their ratios."""
    for tokens, target in {64: 0.0}.items() if context.quick else TARGETS.items():
        yield from _steps(context, tokens, target or None)
    yield from _memory(context)
    yield from _ssd(context)


def _steps(context: Context, tokens: int, target: float | None) -> Iterator[Figure]:
    context.say(f"{tokens} tokens")
    sides = {"one": ("strata", 1, 2), "two": ("strata", 2, 1)}
    if tokens < 1024:
        sides["fsdp2"] = ("fsdp2", 2, 1)
        if not context.quick:
            sides["deepspeed"] = ("deepspeed", 2, 1)
    with ExitStack() as stack:
        steps: dict[str, Callable[[], float]] = {}
        for name, (side, ranks, threads) in sides.items():
            group = stack.enter_context(
                closing(training_group(context, side, tokens, ranks, threads))
            )
            for _ in range(WARM_UP_STEPS):
                group.step()
            steps[name] = group.step
        taken = take_turns(steps, context.rounds, context.say)
    for name, seconds in taken.items():
        yield Figure("ranks", f"{name}_{tokens}_tokens", statistics.median(seconds), "s")
    ratio = median_ratio(taken["two"], taken["one"])
    yield Figure("ranks", f"two_over_one_{tokens}_tokens", ratio, "x", target, bound=1)
    for peer in taken.keys() & PEERS.keys():
        speed = median_ratio(taken[peer], taken["two"])
        wanted = None if target is None else PEERS[peer]
        yield Figure(
            "ranks", f"speed_over_{peer}_{tokens}_tokens", speed, "x", wanted, better="higher"
        )


def _memory(context: Context) -> Iterator[Figure]:
    """Bytes of all ranks together, by their number."""
    host: dict[int, float] = {}
    process: dict[int, float] = {}
    for ranks in (1, 2, 4):
        with closing(training_group(context, "strata", 128, ranks, 1)) as group:
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


def _ssd(context: Context) -> Iterator[Figure]:
    """Bytes that a step of all ranks together reads from the SSD and writes to it, by their
    number, with the state there."""
    moved: dict[int, float] = {}
    for ranks in (1, 2, 4):
        with (
            context.scratch() as folder,
            closing(training_group(context, "strata", 128, ranks, 1, ssd=folder)) as group,
        ):
            for _ in range(WARM_UP_STEPS):
                group.step()
            before = _moved(group)
            for _ in range(SSD_TURNS):
                group.step()
            moved[ranks] = (_moved(group) - before) / (SSD_TURNS * STEPS_OF_A_TURN)
        yield Figure("ranks", f"ssd_step_{ranks}", moved[ranks] / 1e6, "MB")
    for ranks in (2, 4):
        target = None if context.quick else SSD_TARGET
        ratio = moved[ranks] / moved[1]
        yield Figure("ranks", f"ssd_step_{ranks}_over_1", ratio, "x", target, bound=1)


def _moved(group: Group) -> float:
    return sum(float(answer["moved"]) for answer in group.ask("ssd"))
