"""The same training by one to four ranks under every combination of budgets, page size and update
mode: bitwise equal weights and moments, and in float32 the parameters of DistributedDataParallel.

On the step, a step has twelve micro-batches whatever the number of ranks is. In the other modes
each rank has one, and a process that is alone takes as many. (The suite `simulator` compares
sessions that the `loopback` transport joins.)
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

from .common import Context, Figure
from .rank_group import Group
from .ranks_equal_child import MODES, PAGES, PLACES, Combination

RANKS = (1, 2, 3, 4)
DDP_TARGET = 1e-6


def combinations(context: Context) -> list[Combination]:
    """Those of each number of ranks."""
    if context.quick:
        return [("ssd", PAGES[0], "on_step"), ("resident", PAGES[1], "in_backward")]
    return list(itertools.product(PLACES, PAGES, MODES))


def run(context: Context) -> Iterator[Figure]:
    """Yields how many runs differ from one process, and the distance from DDP."""
    count = different = 0
    distance = 0.0
    with context.scratch() as folder, ExitStack() as stack:
        alone = stack.enter_context(closing(group(context, folder, 1)))

        @cache
        def expected(mode: str, ranks: int) -> object:
            """Of one process, which adds up the micro-batches of all ranks."""
            return alone.ask(json.dumps(["resident", PAGES[0], mode, ranks]))[0]["digest"]

        for ranks in RANKS[:2] if context.quick else RANKS:
            context.say(f"{ranks} rank(s)")
            with closing(group(context, folder, ranks)) as side:
                for each in combinations(context):
                    found = {a["digest"] for a in side.ask(json.dumps([*each, ranks]))}
                    count += 1
                    if found != {expected(each[2], ranks)}:
                        different += 1
                        context.say(f"{ranks} ranks, {each}: differs")
                if ranks == 2:
                    distance = max(float(a["distance"]) for a in side.ask("ddp"))
    yield Figure("ranks-equal", "runs", count, "runs")
    yield Figure("ranks-equal", "runs_that_differ", different, "runs", target=0)
    yield Figure("ranks-equal", "float32_distance_from_ddp", distance, "relative", DDP_TARGET)


def group(context: Context, folder: Path, ranks: int) -> Group:
    """Processes that train whatever they are asked to."""
    arguments = [str(folder), f"--seed={context.seed}"]
    return Group("benchmarks.ranks_equal_child", arguments, ranks)
