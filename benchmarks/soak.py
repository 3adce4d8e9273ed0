"""A run that goes on for --minutes, with a snapshot behind every twentieth step: whether its memory
grows, whether all slots and links are accounted for, and whether its state is that of a run without
snapshots. It pauses between steps, for its load does not matter. tests/cpp/soak_test.cpp does the
same in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import strata
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshots.format import LINKS
from strata._storage.snapshots.pages import slots_of
from strata._storage.snapshots.series import snapshots_of

from .common import Context, Figure
from .crash_child import SERIES, Setting, Training, prepare

MINUTES, QUICK_MINUTES = 30.0, 0.05
EVERY, KEEP = 20, 2  # steps to a snapshot, and snapshots that stay
WARM_STEPS = 200
PAUSE_SECONDS = 0.02
GROWTH_TARGET = 8e6  # bytes: what malloc keeps of the moments when all threads are busy
STATM_PAGE = 4096


def run(context: Context) -> Iterator[Figure]:
    """Yields steps, snapshots, growth, and what is not accounted for."""
    minutes = context.minutes or (QUICK_MINUTES if context.quick else MINUTES)
    prepare()
    with context.scratch() as folder:
        (folder / "drive0").mkdir()
        training = Training(Setting(place="ssd", drives=1), folder)
        first = most = 0
        end = time.monotonic() + 60 * minutes
        taken = 0
        while time.monotonic() < end or training.steps % EVERY != 0:
            training.step()
            time.sleep(0 if context.quick else PAUSE_SECONDS)
            if training.steps % EVERY != 0:
                continue
            extra = {"step": training.steps}
            handle = strata.snapshot(training.model, folder / SERIES, keep=KEEP, extra=extra)
            taken += 1
            if training.steps == WARM_STEPS:
                first = _resident_bytes()
            if first:
                most = max(most, _resident_bytes())
            if taken % 500 == 0:
                context.say(
                    f"{training.steps} steps, {(most - first) / 1e6:.1f} MB more than at first"
                )
        handle.wait()
        yield Figure("soak", "steps", training.steps, "steps")
        yield Figure("soak", "snapshots", taken, "snapshots")
        yield Figure("soak", "memory_growth", max(0, most - first), "bytes", GROWTH_TARGET)
        yield Figure("soak", "slots_unaccounted", _lost_slots(training, folder), "slots", target=0)
        yield Figure("soak", "names_unaccounted", _lost_names(folder), "names", target=0)
        digest, steps = training.digest(), training.steps
        assert training.load(folder / SERIES)
        same = training.steps == steps and training.digest() == digest
        yield Figure("soak", "newest_differs", not same, "snapshots", target=0)
        strata.unwrap(training.model)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * STATM_PAGE


def _lost_slots(training: Training, folder: Path) -> int:
    """Slots that snapshots hold, beyond those of the pages of what is there."""
    wanted = set()
    for snapshot in snapshots_of(folder / SERIES):
        wanted |= {slot for slot, *_ in slots_of(read_manifest(snapshot))}
    state = wrapped(training.model)
    state.synchronize()
    stats: dict[str, Any] = state.session.stats()
    most = len(wanted)
    return max(0, int(stats["slots_kept"]) - most)


def _lost_names(folder: Path) -> int:
    kept = snapshots_of(folder / SERIES)
    there = list((folder / SERIES).iterdir())
    links = list((folder / "drive0" / LINKS).iterdir())
    return abs(len(there) - len(kept)) + abs(len(links) - 2 * len(kept)) + abs(KEEP - len(kept))
