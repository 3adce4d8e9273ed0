"""The planner of the real core, through its dictionaries."""

import copy
import math
import re
import threading
from typing import Any

import pytest
from strata import _core

PAGE = 1 << 20
UNITS = 6


def made_up_trace() -> _core.Trace:
    """Six units there and back, 10 ms forward and 20 ms backward each, 8 pages of saved tensors."""
    order = [*range(UNITS), *reversed(range(UNITS))]
    live = [i * 8 if i < UNITS else (2 * UNITS - i) * 8 for i in range(2 * UNITS)]
    return _core.Trace(
        uses=[
            _core.Use(
                unit=unit, backward=i >= UNITS, enter=2 * i, leave=2 * i + 1,
                seconds=0.02 if i >= UNITS else 0.01, gap_seconds=0.0,
                live_bytes=live[i] * PAGE, peak_bytes=(live[i] + 10) * PAGE,
                gap_peak_bytes=live[i] * PAGE,
            )
            for i, unit in enumerate(order)
        ],
        moments=4 * UNITS,
        units=[
            _core.TracedUnit(
                name=f"layers.{i}", elements=4 * PAGE // 2, param_bytes=4 * PAGE,
                grad_bytes=4 * PAGE, state_bytes=20 * PAGE, chunks=4, slices_max=4,
                may_swap=True, may_recompute=True, traced="keep", slices_traced=1,
            )
            for i in range(UNITS)
        ],
        tensors=[
            _core.SavedTensor(
                unit=i, bytes=size * PAGE, born=i, last_used=2 * UNITS - 1 - i,
                input=size == 1,
            )
            for i in range(UNITS)
            for size in (7, 1)
        ],
        tail_seconds=0.001,
        tail_peak_bytes=0,
    )  # fmt: skip


def made_up_costs() -> _core.Costs:
    return _core.Costs(
        compute_scale=1.0,
        upload_bytes_s=8e9,
        download_bytes_s=8e9,
        read_bytes_s=2e9,
        write_bytes_s=1e9,
        update_elements_s=5e8,
        transfer_seconds=1e-5,
        slice_seconds=1e-3,
        slow={"compute": {"update": 0.8}, "read": {"write": 0.6}, "write": {"read": 0.5}},
    )


def made_up_budgets(device: int = 200, host: int = 400) -> _core.Budgets:
    """In pages."""
    return _core.Budgets(
        page_bytes=PAGE,
        device_bytes=device * PAGE,
        host_bytes=host * PAGE,
        ssd_bytes=1000 * PAGE,
        staging_bytes=40 * PAGE,
    )


def made_up_plan(
    device: int = 200, host: int = 400, activation: Any = None, **costs: float
) -> _core.PaperPlan:
    wishes = _core.Wishes(activation=activation, on_device=[False] * UNITS)
    machine = made_up_costs().replace(**costs)
    return _core.PaperPlan(made_up_trace(), machine, made_up_budgets(device, host), wishes)


def test_a_plan_keeps_its_promises() -> None:
    for device in (200, 60, 40):
        paper = made_up_plan(device)
        plan = paper.plan
        assert plan.feasible, plan.refusal
        assert paper.check() == ""
        assert len(plan.units) == len(plan.resident) == UNITS
        assert len(plan.device_curve) == 2 * UNITS
        peak = plan.peaks["device"]
        assert peak.bytes == max(plan.device_curve) <= peak.budget == device * PAGE
        assert paper.plan == plan


def test_forced_modes_are_what_units_do() -> None:
    for activation, expected in [("keep", "keep"), ("recompute", "recompute")]:
        plan = made_up_plan(200, activation=activation).plan
        assert {unit.activation for unit in plan.units} == {expected}


def planned(on_device: Any, device: int = 200, host: int = 400, ssd: int = 1000) -> _core.PaperPlan:
    """In pages. None: the planner chooses what rests on the device."""
    wishes = _core.Wishes(on_device=on_device)
    budgets = made_up_budgets(device, host).replace(ssd_bytes=ssd * PAGE)
    return _core.PaperPlan(made_up_trace(), made_up_costs(), budgets, wishes)


def test_what_rests_on_the_device_is_chosen() -> None:
    none = [False] * UNITS
    assert made_up_plan().plan == planned(none).plan  # left out: none
    # 1. Where it is faster: states on the SSD take longer than all else.
    chosen, without = planned(None, host=100), planned(none, host=100)
    assert chosen.check() == ""
    assert any(unit.on_device for unit in chosen.plan.units)
    assert chosen.simulate().step_seconds < 0.95 * without.simulate().step_seconds
    assert chosen.bound().seconds <= without.bound().seconds
    # 2. Where nothing else holds it.
    plan = planned(None, host=100, ssd=0).plan
    assert plan.feasible, plan.refusal
    assert sum(unit.on_device for unit in plan.units) == 3  # 168 pages, of which 100 fit
    assert "infeasible: host" in planned(none, host=100, ssd=0).plan.refusal
    # 3. Where the device does not hold it either, what it can hold counts.
    refusal = planned(None, device=100, host=100, ssd=0).plan.refusal
    assert "beside those on the device" in refusal
    enough = re.search(r"; ([0-9.]+) MiB would do", refusal)
    assert enough
    assert 100 < float(enough[1]) < 168
    host = math.floor(float(enough[1]))
    assert planned(None, device=100, host=host, ssd=0).plan.feasible


def test_units_rest_on_the_device_as_wished() -> None:
    wish = [True, False, True, False, False, False]
    paper = planned(wish)
    plan = paper.plan
    assert paper.check() == ""
    assert [unit.on_device for unit in plan.units] == wish
    assert plan.resting_device_bytes == 2 * 28 * PAGE
    assert plan.resting_host_bytes + plan.resting_ssd_bytes == 4 * 28 * PAGE
    assert plan.param_device_bytes <= 4 * 4 * PAGE
    lanes, others = paper.simulate().lanes, planned([False] * UNITS).simulate().lanes
    assert lanes["download"].bytes <= others["download"].bytes - 2 * 4 * PAGE
    with pytest.raises(ValueError, match="on_device needs an entry for every unit"):
        planned([True])


def test_what_cannot_be_is_refused_and_said() -> None:
    paper = made_up_plan(device=5)
    plan = paper.plan
    assert not plan.feasible
    assert "infeasible" in plan.refusal
    assert paper.check() == plan.refusal
    assert plan.device_bytes_min > 5 * PAGE
    with pytest.raises(ValueError, match="infeasible"):
        paper.simulate()
    enough = -(-plan.device_bytes_min // PAGE)
    assert made_up_plan(device=enough).plan.feasible


def test_a_step_is_played_on_this_machine_or_another() -> None:
    paper = made_up_plan(host=100)  # most states rest on the SSD
    run = paper.simulate()
    assert run.spans == []
    busy = run.lanes["compute"].busy_seconds + sum(s.seconds for s in run.stalls)
    assert run.step_seconds == pytest.approx(busy)
    assert run.lanes["download"].bytes >= UNITS * 4 * PAGE
    assert run.lanes["read"].bytes > 0
    assert run == paper.simulate(made_up_costs())
    faster = made_up_costs().replace(read_bytes_s=8e9, write_bytes_s=8e9)
    assert paper.simulate(faster).step_seconds < run.step_seconds
    waiting = paper.simulate(made_up_costs().replace(landing_waits=True))
    landing = [s for s in waiting.stalls if s.lane == "download" and s.purpose == "grad"]
    assert {stall.use for stall in landing} >= set(range(UNITS + 1, 2 * UNITS))
    without_ssd = made_up_costs().replace(read_bytes_s=0.0)
    assert math.isinf(paper.simulate(without_ssd).step_seconds)


def test_spans_tell_what_each_lane_did() -> None:
    run = made_up_plan(host=100).simulate(spans=True)
    begins = [span.begin for span in run.spans]
    assert begins == sorted(begins)
    assert begins[0] >= 0.0
    computed = [span for span in run.spans if span.lane == "compute"]
    assert [span.unit for span in computed if span.purpose == "forward"] == [*range(UNITS)]
    assert computed[-1].purpose == "outside"
    assert computed[-1].unit == -1
    assert computed[-1].end == pytest.approx(run.step_seconds)
    for lane, use in run.lanes.items():
        moved = sum(span.bytes for span in run.spans if span.lane == lane)
        assert moved == use.bytes


def test_no_step_is_shorter_than_the_bound() -> None:
    for write_bytes_s, what in [(1e9, "compute"), (1e8, "ssd")]:
        paper = made_up_plan(host=100, write_bytes_s=write_bytes_s)
        bound = paper.bound()
        assert bound.what == what
        assert bound.seconds <= paper.simulate().step_seconds
        assert bound.lane_seconds["compute"] == pytest.approx(UNITS * 0.03 + 0.001)


def test_threads_plan_at_the_same_time() -> None:
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(made_up_plan(60).plan)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)


def test_what_is_missing_or_unknown_is_named() -> None:
    trace = made_up_trace()
    structs = [trace, trace.uses[0], trace.units[0], trace.tensors[0], made_up_costs()]
    for whole in [*structs, made_up_budgets()]:
        fields = {name: getattr(whole, name) for name in whole.to_dict()}
        assert type(whole)(**fields) == whole
        optional = {"landing_waits", "updates_first", "grads_rest", "code_bytes"}
        optional |= {"decode_bytes_s"}
        optional |= {name for name in fields if name.startswith("remote_")}
        for name in fields.keys() - optional:
            with pytest.raises(TypeError, match=f"needs {name}"):
                type(whole)(**{key: fields[key] for key in fields if key != name})
        with pytest.raises(TypeError, match="has no laxity"):
            whole.replace(laxity=1)
        with pytest.raises(TypeError, match="cannot be"):
            whole.replace(**{next(iter(fields)): object()})


def test_structs_are_copied_and_changed_in_place() -> None:
    trace = made_up_trace()
    other = copy.deepcopy(trace)
    trace.uses[2].seconds = 7.0
    assert trace.uses[2].seconds == 7.0
    assert other != trace
    other.uses[2].seconds = 7.0
    assert other == trace
    assert trace.to_dict()["uses"][2]["seconds"] == 7.0
    assert trace.to_dict()["units"][0]["traced"] == "keep"


def test_what_contradicts_itself_is_refused_in_words() -> None:
    def refused(match: str, trace: Any = None, **costs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            _core.PaperPlan(
                trace or made_up_trace(),
                made_up_costs().replace(**costs),
                made_up_budgets(),
                _core.Wishes(),
            )

    trace = made_up_trace()
    trace.uses[2].unit = 99
    refused("use 2: there is no such unit", trace)
    with pytest.raises(ValueError, match="unknown activation forgotten"):
        made_up_trace().units[0].replace(traced="forgotten")
    refused("read_bytes_s is negative or not a number", read_bytes_s=math.nan)
    refused("slow is a share", slow={"read": {"write": 0.0}})
    refused("unknown lane reed", slow={"reed": {"write": 0.5}})
