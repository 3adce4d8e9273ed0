"""One update of 100 million parameters, bfloat16 gradient in and bfloat16 parameter out: strata's
kernel against DeepSpeed's CPU Adam and torch's fused AdamW with the casts that they need, and
against a loop that reads and writes strata's bytes and computes nothing. All take turns; all have
their memory in huge pages, as strata's frames are.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping

from .adam import BYTES_PER_PARAMETER, LOOP
from .common import BenchError, Context, Figure, median_ratio, share_of_best, take_turns
from .peers import environment
from .peers.child import Child

COUNT = 100_000_000
WARM_UP_TURNS = 2
# With a float32 master: gradient read and its copy written; parameter and two moments read and
# written, the copy read; parameter read and its 16-bit form written.
MASTER_BYTES = (2 + 4) + (2 * (4 + 4 + 4) + 4) + (4 + 2)
BYTES = {
    "strata": BYTES_PER_PARAMETER["strata"],
    "deepspeed": MASTER_BYTES,
    "torch": MASTER_BYTES,
    "loop": BYTES_PER_PARAMETER["strata"],
}
TARGET_OVER_DEEPSPEED = 1.3
TARGET_OF_LOOP = 95.0


def open_children(context: Context, count: int, threads: int) -> Iterator[tuple[str, Child]]:
    """The process of the optimizers and that of the loop."""
    python = environment.python(context)
    if not LOOP.exists():
        raise BenchError(f"{LOOP} is not built")
    env = {**environment.variables(threads), "THP_MEM_ALLOC_ENABLE": "1"}
    sizes = [f"--count={count}", f"--threads={threads}"]
    yield "optimizers", Child([str(python), "-m", "benchmarks.peers.optimizers", *sizes], env)
    sizes = ["--params", str(count), "--threads", str(threads)]
    yield "loop", Child([str(LOOP), "--serve", "1", *sizes], env)


def run(context: Context) -> Iterator[Figure]:
    """Yields nanoseconds and bytes per parameter of each side, and their ratios."""
    count = 1 << 20 if context.quick else COUNT
    threads = len(os.sched_getaffinity(0))
    children: dict[str, Child] = {}
    try:
        for name, child in open_children(context, count, threads):
            children[name] = child
        sides = {name: asking(children.get(name, children["optimizers"]), name) for name in BYTES}
        take_turns(sides, WARM_UP_TURNS, lambda text: None)  # touches every page
        taken = take_turns(sides, 3 * context.rounds, context.say)
    finally:
        for child in children.values():
            child.close()
    yield from figures(taken, count)


def asking(child: Child, name: str) -> Callable[[], float]:
    """A side that is a command of a child."""
    return lambda: float(child.ask(name)["seconds"])


def figures(taken: Mapping[str, list[float]], count: int) -> Iterator[Figure]:
    """What the turns say."""
    bench = "adam-peers"
    for name, seconds in taken.items():
        nanoseconds = statistics.median(seconds) / count * 1e9
        yield Figure(bench, f"{name}_time", nanoseconds, "ns/parameter")
        yield Figure(bench, f"{name}_bytes", BYTES[name], "bytes/parameter")
    for peer, target in {"deepspeed": TARGET_OVER_DEEPSPEED, "torch": None}.items():
        ratio = median_ratio(taken[peer], taken["strata"])
        yield Figure(bench, f"speed_over_{peer}", ratio, "ratio", target, better="higher")
    rates = {name: [1 / each for each in taken[name]] for name in ("strata", "loop")}
    percent = share_of_best(rates["strata"], rates["loop"])
    yield Figure(bench, "of_loop", percent, "%", TARGET_OF_LOOP, bound=100.0, better="higher")
