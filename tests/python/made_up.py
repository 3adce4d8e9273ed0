"""Made-up steps, plans and reports, for the tests of what is shown of them."""

from typing import Any

from strata import _core
from strata._profiling.timeline import StepRecord, UseSpan, link_bytes, stall_seconds
from strata._profiling.windows import Judged
from strata._report.reports import Lag, Report, TierUse, Wear, planned_peaks, planned_rows

# The last one is there to be escaped.
UNITS = ["embed", "layers.0", "layers.1", "<b>head</b> & $x$"]
PAGE = 1 << 20
LIMITED = "limited by the SSD (twice as fast it would save 30% of a step)"


def span(track: str, begin: float, end: float, unit: int = 1, **more: Any) -> Any:
    """Times in seconds."""
    return {
        "track": track, "cause": "none", "lane": 0, "backward": False, "unit": unit,
        "begin_ns": round(begin * 1e9), "end_ns": round(end * 1e9), "bytes": PAGE, **more,
    }  # fmt: skip


def record(step: int = 0, begin: float = 100.0, **more: Any) -> StepRecord:
    """A step of a second: forward and backward over four units, 0.12 s each."""
    uses, spans = [], []
    for i, unit in enumerate([0, 1, 2, 3, 3, 2, 1, 0]):
        at = begin + i * 0.12
        uses.append(UseSpan(unit, i >= 4, at, at + 0.02, at + 0.12))
        spans.append(span("upload", at - 0.06, at + 0.01, unit))
    spans += [
        span("wait", begin + 0.12, begin + 0.13, 1, cause="ssd", bytes=0),
        span("wait", begin + 0.13, begin + 0.14, 1, cause="copy", bytes=0),
        span("wait", begin + 0.36, begin + 0.39, 3, cause="ssd", bytes=0),
        span("wait", begin + 0.99, begin + 1.0, -1, cause="update", bytes=0, backward=True),
        span("read", begin + 0.0, begin + 0.4, 2, bytes=4 * PAGE),
        span("read", begin + 0.3, begin + 0.5, 3, bytes=2 * PAGE),
        span("write", begin + 0.5, begin + 0.9, 2, bytes=3 * PAGE),
        span("download", begin + 0.6, begin + 0.61, 2),
        span("update", begin + 0.7, begin + 0.8, 2, lane=0),
        span("update", begin + 0.7, begin + 0.85, 1, lane=1),
        span("update", begin + 0.95, begin + 1.2, 0, lane=1),  # into the next step
    ]
    fields: dict[str, Any] = {"uses": uses, "spans": spans, "units": UNITS, **more}
    return StepRecord(step, begin, begin + 1.0, **fields)


def trace() -> _core.Trace:
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    return _core.Trace(
        uses=[
            _core.Use(
                unit=unit, backward=i >= 4, enter=2 * i, leave=2 * i + 1,
                seconds=0.1, gap_seconds=0.0, live_bytes=0, peak_bytes=PAGE,
                gap_peak_bytes=0,
            )
            for i, unit in enumerate(order)
        ],
        moments=16,
        units=[
            _core.TracedUnit(
                name=name, elements=PAGE, param_bytes=2 * PAGE, grad_bytes=2 * PAGE,
                state_bytes=10 * PAGE, chunks=2, slices_max=8, may_swap=True,
                may_recompute=True, traced="keep", slices_traced=1,
            )
            for name in UNITS
        ],
        tensors=[
            _core.SavedTensor(unit=unit, bytes=3 * PAGE, born=unit, last_used=7 - unit, input=False)
            for unit in range(4)
        ],
        tail_seconds=0.0,
        tail_peak_bytes=0,
    )  # fmt: skip


def plan() -> _core.StepPlan:
    def unit(activation: str, slices: int = 1, ssd: int = 0) -> _core.PlannedUnit:
        return _core.PlannedUnit(
            activation=activation, slices=slices, on_device=False, param_ssd_bytes=0,
            grad_ssd_bytes=ssd // 2, state_ssd_bytes=5 * ssd,
        )  # fmt: skip

    return _core.StepPlan(
        feasible=True,
        refusal="",
        refused_units=[],
        device_bytes_min=8 * PAGE,
        units=[
            unit("swap_host"),
            unit("swap_ssd", ssd=2 * PAGE),
            unit("recompute", 4),
            unit("keep"),
        ],
        lookahead=2,
        resident=[True, False, False, False],
        param_device_bytes=6 * PAGE,
        resting_device_bytes=0,
        activation_device_bytes=4 * PAGE,
        activation_host_bytes=3 * PAGE,
        activation_ssd_bytes=3 * PAGE,
        activation_lookahead=1,
        resting_host_bytes=20 * PAGE,
        resting_ssd_bytes=11 * PAGE,
        device_curve=[(7 + i) * PAGE for i in (0, 1, 2, 3, 3, 2, 1, 0)],
        peaks={
            "device": _core.Peak(bytes=10 * PAGE, budget=12 * PAGE, use=4),
            "host": _core.Peak(bytes=23 * PAGE, budget=32 * PAGE, use=1),
            "ssd": _core.Peak(bytes=14 * PAGE, budget=64 * PAGE, use=2),
        },
    )


def simulation() -> _core.Simulation:
    lanes = ("compute", "upload", "download", "read", "write", "update")
    return _core.Simulation(
        step_seconds=0.95,
        lanes={lane: _core.LaneUse(busy_seconds=0.1, bytes=5 * PAGE) for lane in lanes},
        stalls=[_core.Stall(use=1, lane="read", purpose="param", seconds=0.02)],
        spans=[
            _core.SimulatedSpan(
                lane="read", purpose="param", unit=2, begin=0.1, end=0.3,
                bytes=5 * PAGE,
            )
        ],
    )  # fmt: skip


def every_speed(speed: float) -> _core.Costs:
    """A machine of which everything is so fast."""
    rates = ("upload", "download", "read", "write")
    return _core.Costs(
        compute_scale=speed, update_elements_s=speed, transfer_seconds=speed, slice_seconds=speed,
        slow={"compute": {"update": 0.5}}, **{f"{lane}_bytes_s": speed for lane in rates},
    )  # fmt: skip


def bound() -> _core.Bound:
    return _core.Bound(
        seconds=0.8, compute_seconds=0.8, lane_work={}, update_seconds=0.2,
        lane_seconds={}, ssd_seconds=0.4, what="computation",
    )  # fmt: skip


class Planning:
    """A planning that plans nothing: what a report reads of it, and what hooks call."""

    def __init__(self) -> None:
        self.plan = plan()
        self.trace = trace()
        self.simulation = simulation()
        self.bound = bound()
        self.judged = Judged(1.0, 7, 7.0, whole=True)
        self.limited = LIMITED

    def begin_forward(self, args: Any, kwargs: Any) -> None:
        pass

    def end_step(self) -> None:
        pass


def records() -> list[StepRecord]:
    """Three steps. The first one ran under another plan: it must not count."""
    other = record(3, 99.0, predicted_seconds=9.0, plan=1)
    promise = {"predicted_seconds": 0.95, "plan": 2}
    return [other, *(record(4 + i, 100.0 + i, **promise) for i in range(2))]


def report(**more: Any) -> Report:
    """A report with everything in it."""
    mine = records()[1:]
    links = link_bytes(mine)
    fields: dict[str, Any] = {
        "steps": 3, "steps_nonfinite": 1, "steps_skipped": 0, "grad_norm": 0.5,
        "tiers": {
            "device": TierUse(12 * PAGE, 9 * PAGE, 10 * PAGE),
            "host": TierUse(32 * PAGE, 23 * PAGE, 23 * PAGE),
            "ssd": TierUse(64 * PAGE, 14 * PAGE, 14 * PAGE),
        },
        "link_bytes": {name: int(3 * moved) for name, moved in links.items()},
        "waited_seconds": dict.fromkeys(UNITS, 0.1),
        "page_bytes": PAGE, "io_engine": "threads", "backend": "host", "stats": {},
        "measured_seconds": 1.0, "predicted_seconds": 0.95, "bound_seconds": 0.8,
        "bound_what": "computation", "percent_of_bound": 80.0,
        "judged": Judged(1.0, 7, 7.0, whole=True), "limited": LIMITED,
        "model": "Llama <3>", "command": "strata finetune --steps=3", "machine": "a processor",
        "stalls": stall_seconds(mine), "link_bytes_per_step": links,
        "ssd_written_per_step": links["host to ssd"], "wear": Wear.of(links["host to ssd"], 1.0),
        "peaks": planned_peaks(plan(), trace()), "planned": planned_rows(plan(), trace()),
        "plan": plan(), "trace": trace(), "simulation": simulation(), "records": mine,
    }  # fmt: skip
    return Report(**{**fields, **more})


def lags(units: int = len(UNITS)) -> list[Lag]:
    """Forwards of three steps; the first unit waited once, the last one never lagged."""
    names = [*UNITS, *(f"layers.{i}" for i in range(len(UNITS), units))]
    return [
        Lag(name, [3] if i + 1 == units else [1, 2], merged=2 * i, waits=int(i == 1))
        for i, name in enumerate(names[:units])
    ]


def bare_report() -> Report:
    """A report of a model without a plan, and before any step."""
    return Report(
        steps=0, steps_nonfinite=0, steps_skipped=0, grad_norm=None,
        tiers={"device": TierUse(PAGE, 0, 0)}, link_bytes={"host to device": 0},
        waited_seconds=dict.fromkeys(UNITS, 0.0), page_bytes=PAGE, io_engine="", backend="host",
        stats={},
    )  # fmt: skip
