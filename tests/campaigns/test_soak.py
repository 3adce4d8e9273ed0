"""A long run with a snapshot after every twentieth step: its memory does not grow, all slots and
links are accounted for, and its newest snapshot is whole. tests/cpp/soak_test.cpp does the same in
virtual time.

STRATA_SOAK_MINUTES=30 is a campaign; then it pauses between steps, as its load does not matter.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import strata
from random_training import SERIES, Setting, Training
from strata._runtime.wrapped import wrapped
from strata._storage.checkpoint_files import read_manifest
from strata._storage.snapshot_files import LINKS
from strata._storage.snapshot_pages import slots_of
from strata._storage.snapshot_series import snapshots_of

EVERY, KEEP = 20, 2  # steps to a snapshot, and snapshots that stay
WARM_STEPS = 200
PAUSE_SECONDS = 0.02
GROWTH_MAX = 8e6  # bytes: what malloc keeps of the moments when all threads are busy
STATM_PAGE = 4096


def test_a_long_run_takes_no_more_memory_slots_or_names(tmp_path: Path) -> None:
    minutes = float(os.environ.get("STRATA_SOAK_MINUTES", "0.3"))
    (tmp_path / "drive0").mkdir()
    series = tmp_path / SERIES
    training = Training(Setting(place="ssd"), tmp_path)
    end, resident = time.monotonic() + 60 * minutes, []
    while time.monotonic() < end or training.steps < WARM_STEPS or training.steps % EVERY != 0:
        training.step()
        time.sleep(PAUSE_SECONDS if minutes >= 1 else 0)
        if training.steps % EVERY == 0:
            extra = {"step": training.steps}
            handle = strata.snapshot(training.model, series, keep=KEEP, extra=extra)
            if training.steps >= WARM_STEPS:
                resident.append(_resident_bytes())
    handle.wait()
    assert max(resident) - resident[0] <= GROWTH_MAX
    assert _lost_slots(training, series) == 0
    kept = snapshots_of(series)
    assert len(kept) == KEEP
    assert len(list(series.iterdir())) == KEEP
    assert len(list((tmp_path / "drive0" / LINKS).iterdir())) == 2 * KEEP
    digest, steps = training.digest(), training.steps
    assert training.load(series)
    assert (training.steps, training.digest()) == (steps, digest)
    strata.unwrap(training.model)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * STATM_PAGE


def _lost_slots(training: Training, series: Path) -> int:
    """Slots that snapshots hold, beyond those of the pages of the snapshots that are there."""
    wanted = {slot for each in snapshots_of(series) for slot, *_ in slots_of(read_manifest(each))}
    state = wrapped(training.model)
    state.synchronize()
    stats: dict[str, Any] = state.session.stats()
    return max(0, int(stats["slots_kept"]) - len(wanted))
