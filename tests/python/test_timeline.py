"""What is kept of the last steps, and what is reckoned from it."""

from types import ModuleType

import pytest
import strata
from made_up import PAGE, UNITS, record, records, span
from small_models import build, llama, tight, train
from strata._hooks import land_hook
from strata._profiling.timeline import (
    LINKS,
    StepLog,
    StepRecord,
    UseSpan,
    bandwidth,
    link_bytes,
    measured_seconds,
    stall_name,
    stall_seconds,
    steady,
)
from strata._runtime.wrapped import wrapped


class Session:
    """A session that did one thing since it was last asked."""

    def __init__(self) -> None:
        self.asked = 0

    def timeline(self) -> list:
        self.asked += 1
        return [span("read", self.asked, self.asked + 1)]


def test_a_log_keeps_the_last_steps() -> None:
    log = StepLog(Session(), UNITS, keep=2)
    for step in range(3):
        log.end_step(step, step + 0.5, [UseSpan(0, False, step, step, step)])
    assert [kept.step for kept in log.records] == [1, 2]
    assert [kept.spans[0]["begin_ns"] for kept in log.records] == [2_000_000_000, 3_000_000_000]
    assert log.end_step(None, 4.0, []).begin == 2.5, "where the last one ended"
    fresh = StepLog(Session(), UNITS)
    assert fresh.end_step(None, 4.0, [UseSpan(0, False, 3.0, 3.1, 3.5)]).begin == 3.0


def test_what_came_before_the_first_step_is_left_out() -> None:
    log = StepLog(Session(), UNITS)
    assert log.end_step(2.5, 3.0, []).spans == []  # it had ended at 2
    assert len(log.end_step(9.0, 9.5, []).spans) == 1, "later, updates between steps belong to one"


def test_only_steps_of_the_newest_plan_count() -> None:
    assert [kept.step for kept in steady(records())] == [4, 5]
    assert steady([]) == []
    assert measured_seconds(steady(records())) == 1.0
    assert measured_seconds([]) is None


def test_the_first_step_counts_only_where_it_is_alone() -> None:
    assert [kept.step for kept in steady([record(0), record(1), record(2)])] == [1, 2]
    assert [kept.step for kept in steady([record(0)])] == [0]


def test_stalls_are_summed_by_cause_and_unit() -> None:
    found = stall_seconds([record(), record(1, 200.0)])
    assert list(found) == ["ssd", "copy", "update"], "the largest first"
    assert found["ssd"] == pytest.approx({UNITS[3]: 0.03, "layers.0": 0.01})
    assert list(found["ssd"]) == [UNITS[3], "layers.0"]
    assert found["update"] == pytest.approx({"all units": 0.01})
    assert stall_seconds([]) == {}


def test_stalls_have_names() -> None:
    assert stall_name("ssd", "layers.7") == "waiting for layers.7 from ssd"
    assert stall_name("update", "layers.7") == "waiting for the update of layers.7"
    assert stall_name("frame", "{unit}") == "waiting for device memory for {unit}"


def test_bytes_per_link_are_a_mean_over_steps() -> None:
    once, twice = link_bytes([record()]), link_bytes([record(), record()])
    assert once == pytest.approx(twice)
    assert set(once) == set(LINKS.values())
    assert once["ssd to host"] == 6 * PAGE
    assert once["host to device"] == 8 * PAGE


def test_bandwidth_spreads_bytes_over_time() -> None:
    rates = bandwidth(record(), "read", 10)
    assert sum(rates) / 10 == pytest.approx(6 * PAGE)
    assert rates[0] == pytest.approx(10 * PAGE)
    assert rates[3] == pytest.approx(20 * PAGE), "two spans at once"
    assert rates[5:] == [0.0] * 5
    # The first upload began before the step: that part of it is left out.
    assert sum(bandwidth(record(), "upload", 10)) / 10 < 8 * PAGE
    assert bandwidth(StepRecord(0, 1.0, 1.0, [], [], []), "read", 4) == [0.0] * 4


def test_a_real_model_leaves_a_timeline(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(land_hook, "owns_memory", lambda grad: False)  # gradients are copied
    model, optimizer = tight(build(llama))
    session = wrapped(model).session
    train(model, optimizer, 1)
    strata.synchronize(model)
    units = [unit["name"] for unit in session.plan["units"]]
    (step,) = wrapped(model).log.records
    # Updates run on behind the step.
    found = StepRecord(0, 0.0, 1.0, [], [*step.spans, *session.timeline()], units)
    moved = link_bytes([found])
    assert moved["host to device"] > 0
    assert moved["device to host"] == sum(p.numel() * p.element_size() for p in model.parameters())
    updated = {s["unit"] for s in found.spans if s["track"] == "update"}
    assert updated == set(range(len(units)))
    stalls = stall_seconds([found])
    assert all(unit in units for unit in stalls["copy"])
    assert session.timeline() == []
