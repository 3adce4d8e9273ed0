"""From a snapshot on the disk to the first step.

On the same disk: strata.load and the step behind it, updates and all, over a steady step of the
same run, for state that rests on the SSD and in host memory. The first step is recorded, nothing is
fetched ahead, and the plan is made behind it; so it is in a run that loads nothing, whose first
step is given beside it, but which has no moments to read. What rests in host memory is read in the
first step: its bound is the disk.
In another place: a copy of the snapshot, loaded into host memory, against plain reads of its pages
before and behind it; the bound of a round is the most that the disk gave to any of the three.
"""

import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import strata
import torch
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.pages import bytes_of, copy_snapshot, page_paths, slots_of

from .common import MIB, Context, Figure, seconds_of, share_of_best, take_turns
from .disk import read_seconds
from .models import llama_166m_or_small, tokens
from .sides import Paged, room_of_snapshots, state_on_ssd

TOKENS = 128
MORE_BYTES = 14  # of a parameter: all that rests of it
LOAD_MAX_S = 1.0  # beyond the step
SHARE_MIN = 90.0  # of the disk, in percent


class Resumes:
    """A snapshot in a folder of the disk, and runs that go on from it."""

    def __init__(self, context: Context, folder: Path) -> None:
        self._context = context
        self._folder = folder
        self._batch = tokens(TOKENS, context.seed)
        parameters = sum(p.numel() for p in self._fresh().parameters())
        rest = parameters * MORE_BYTES
        self.on_ssd = state_on_ssd(parameters) | room_of_snapshots(parameters)
        self.in_host = self.on_ssd | {"host": self.on_ssd["host"] + rest + 64 * MIB}
        self.firsts: dict[str, list[float]] = {}
        self.loads: dict[str, list[float]] = {}
        self.steady: dict[str, list[float]] = {}

    def _fresh(self) -> torch.nn.Module:
        return llama_166m_or_small(self._context.quick, self._context.seed)

    def _side(self, memory: dict[str, int]) -> Paged:
        return Paged(self._fresh(), self._batch, memory, self._folder)

    def take(self) -> Path:
        """The snapshot's folder."""
        side = self._side(self.on_ssd)
        side.step()
        path = strata.snapshot(side.model, self._folder / "run").wait()
        side.close()
        return path

    def begin(self, memory: dict[str, int]) -> float:
        """Seconds of the first step of a run that loads nothing."""
        side = self._side(memory)
        seconds = _whole_step(side)
        side.close()
        return seconds

    def go_on(self, name: str, memory: dict[str, int], path: Path) -> float:
        """Seconds of load() and the step behind it."""
        side = self._side(memory)
        load = seconds_of(lambda: strata.load(side.model, path))
        first, _, steady = (_whole_step(side) for _ in range(3))
        side.close()
        self.loads.setdefault(name, []).append(load)
        self.firsts.setdefault(name, []).append(first)
        self.steady.setdefault(name, []).append(steady)
        return load + first


def run(context: Context) -> Iterator[Figure]:
    """Yields seconds of load() and of the step behind it, and the rate of a load that reads."""
    with context.scratch() as folder:
        resumes = Resumes(context, folder)
        series = resumes.take()
        manifest = read_manifest(series)
        slots = slots_of(manifest)
        size = bytes_of(manifest)
        copy = folder / "copy" / series.name
        copy_snapshot(series, copy)

        paths = page_paths(read_manifest(copy), copy)
        page = manifest["page_bytes"]
        places = [
            (Path(paths[slot % len(paths)]), slot // len(paths) * page, held)
            for slot, _, _, held in sorted(slots)
        ]

        before, behind = [], []

        def stream() -> float:
            before.append(read_seconds(places))
            seconds = resumes.go_on("other", resumes.in_host, copy)
            behind.append(read_seconds(places))
            return seconds

        def side(name: str, memory: dict[str, int]) -> dict[str, Callable[[], float]]:
            return {
                f"{name}, begun": lambda: resumes.begin(memory),
                f"{name}, resumed": lambda: resumes.go_on(name, memory, series),
            }

        sides = side("ssd", resumes.on_ssd) | side("host", resumes.in_host) | {"other": stream}
        taken = take_turns(sides, context.rounds, context.say)
        shutil.rmtree(copy)
    fastest = min(before + behind)
    for name in ("ssd", "host"):
        resumed, steady = taken[f"{name}, resumed"], resumes.steady[name]
        over = [a - b for a, b in zip(resumed, steady, strict=True)]
        yield _seconds(f"{name}_load", resumes.loads[name])
        yield _seconds(f"{name}_steady_step", steady)
        yield _seconds(f"{name}_first_step", resumes.firsts[name])
        yield _seconds(f"{name}_begun_first_step", taken[f"{name}, begun"])
        reads = fastest if name == "host" else None
        target = LOAD_MAX_S if name == "ssd" else None
        over_step = statistics.median(over)
        yield Figure("resume", f"{name}_over_step", over_step, "s", target=target, bound=reads)
    loads = resumes.loads["other"]
    rates = [[size / s for s in seconds] for seconds in (loads, before, behind)]
    yield _seconds("other_load", loads)
    rate = statistics.median(rates[0])
    yield Figure("resume", "other_bytes_s", rate, "B/s", bound=size / fastest, better="higher")
    share = share_of_best(*rates)
    yield Figure("resume", "other_share", share, "%", target=SHARE_MIN, better="higher")


def _whole_step(side: Paged) -> float:
    """Seconds until its updates are done."""

    def work() -> None:
        side.step()
        side.session.drain()

    return seconds_of(work)


def _seconds(metric: str, values: list[float]) -> Figure:
    return Figure("resume", metric, statistics.median(values), "s")
