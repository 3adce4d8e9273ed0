"""The trace for ui.perfetto.dev."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from made_up import UNITS, record
from strata._report import perfetto


@pytest.fixture
def events(tmp_path: Path) -> list:
    path = tmp_path / "trace.json"
    perfetto.write([record(0, 100.0), record(1, 101.0)], path)
    return json.loads(path.read_text())["traceEvents"]


def names(events: list) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_every_span_has_a_lane_with_a_name(events: list) -> None:
    lanes = names(events)
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in spans} == set(lanes)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["name"] for e in spans)
    assert len(set(lanes.values())) == len(lanes)
    expected = {
        "steps", "compute", "waiting", "ssd to host", "host to ssd", "host to device",
        "device to host", "worker 0", "worker 1",
    }  # fmt: skip
    assert expected <= set(lanes.values())
    assert [lanes[i] for i in sorted(lanes)][:3] == ["steps", "compute", "waiting"]


def test_stalls_and_computation_are_named(events: list) -> None:
    lanes = names(events)
    by_lane: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "X":
            by_lane.setdefault(lanes[event["tid"]], set()).add(event["name"])
    assert "waiting for layers.0 from ssd" in by_lane["waiting"]
    assert "waiting for the update of all units" in by_lane["waiting"]
    assert {f"forward {u}" for u in UNITS} | {f"backward {u}" for u in UNITS} == by_lane["compute"]
    assert by_lane["steps"] == {"step 0", "step 1"}


def test_spans_of_a_lane_nest_or_are_apart(events: list) -> None:
    lanes = names(events)
    for lane in lanes:
        ends: list[float] = []
        for event in sorted(
            (e for e in events if e["ph"] == "X" and e["tid"] == lane),
            key=lambda e: (e["ts"], -e["dur"]),
        ):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, lanes[lane]
            ends.append(event["ts"] + event["dur"])
    # Two reads were in flight at once, so they cannot share a lane.
    assert "ssd to host 2" in lanes.values()


def test_bandwidths_are_counters(events: list) -> None:
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "ssd to host, GB/s"]
    assert max(e["args"]["GB/s"] for e in counters) > 0
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(counters))


def test_nothing_recorded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step was recorded"):
        perfetto.write([], tmp_path / "trace.json")
