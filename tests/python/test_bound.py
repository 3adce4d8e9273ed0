"""The lower bound of a run: no window of steps beats it, however the steps before it went; what
plans learn from steps; and what limits a step.
"""

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import made_up
import pytest
import strata
import torch
from small_models import adamw, build, llama, train
from strata import _core
from strata._planning.limits import Setting, limiting_sentence
from strata._planning.shape_class import REPLAN_FACTOR, Following, ShapeClass
from strata._profiling import windows
from strata._profiling.timeline import StepRecord
from strata._profiling.uses import RecordedStep, RecordedUse
from strata._profiling.windows import (
    Pace,
    Times,
    Window,
    Windows,
    better,
    lower_bound,
    pace_of,
    raised,
)
from strata._runtime.wrapped import wrapped
from test_planner import (
    PAGE,
    UNITS,
    made_up_budgets,
    made_up_costs,
    made_up_plan,
    made_up_trace,
)
from transformers import LlamaConfig, LlamaForCausalLM

LANES = ("upload", "download", "read", "write", "update")


class Clock:
    """Makes up steps that follow each other."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 100.0
        self.random = random.Random(seed)
        self.steps = 0

    def step(
        self, factor: float = 1.0, moved: float = 1.0, gap: float = 0.0
    ) -> tuple[StepRecord, RecordedStep]:
        """One of made_up_trace(): computation takes `factor` times as long as traced, and links are
        busy now and then, also before and behind the step."""
        begin = self.now = self.now + gap
        step = RecordedStep(rounds=1, begin=begin)
        for use in made_up_trace().uses:
            wait_began = self.now
            entered = wait_began + self.random.random() * 1e-3
            left = entered + use.seconds * factor
            seconds = left - entered
            step.uses.append(
                RecordedUse(
                    use.unit,
                    use.backward,
                    0,
                    0,
                    seconds,
                    wait_began=wait_began,
                    entered=entered,
                    left=left,
                )
            )
            self.now = left
        step.tail_seconds = 1e-3 * factor
        self.now += step.tail_seconds
        step.end = self.now
        length = step.end - begin
        spans = []
        for lane in LANES:
            for _ in range(self.random.randrange(4)):
                at = begin + self.random.uniform(-0.3, 0.9) * length
                end = min(self.now, at + self.random.random() * length)
                if end > at:
                    size = int(self.random.random() * 20 * PAGE * moved)
                    spans.append(made_up.span(lane, at, end, bytes=size))
        names = [unit.name for unit in made_up_trace().units]
        record = StepRecord(self.steps, begin, step.end, [], spans, names, plan=1)
        self.steps += 1
        return record, step


def filled(clock: Clock, found: Windows, **more: float) -> Window:
    """The window that steps of a kind fill."""
    while True:
        if window := found.add(*clock.step(**more)):
            return window


def test_a_window_takes_seconds_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = Clock(), Windows()
    assert found.judged is None
    record, step = clock.step()
    assert found.add(record, step) is None
    assert found.judged is not None
    assert not found.judged.whole
    assert found.judged.step_seconds == pytest.approx(record.seconds)
    window = filled(clock, found)
    assert window.seconds >= windows.WINDOW_SECONDS
    assert window.steps >= windows.WINDOW_STEPS
    assert found.judged.whole
    assert found.judged.step_seconds == window.step_seconds
    assert found.begun is None, "what is begun behind it does not count yet"
    assert window.times is not None
    assert window.times.uses == pytest.approx([use.seconds for use in step.uses], rel=1e-6)
    for seconds in window.busy.values():
        assert 0 <= seconds <= window.seconds * (1 + 1e-12)


def test_busy_time_counts_once_and_only_in_steps() -> None:
    found = Windows()
    step = RecordedStep(rounds=1)

    def add(begin: float, end: float, *spans: tuple[float, float]) -> Window | None:
        told = [made_up.span("read", *span) for span in spans]
        return found.add(StepRecord(0, begin, end, [], told, []), step)

    add(0.0, 2.0, (-1.0, 0.5), (0.25, 1.0), (0.5, 1.5))  # 1.5, of which some thrice
    add(3.0, 5.0, (1.75, 3.5), (3.0, 3.25))  # 0.25 in the step before, 0.5 in this one
    window = add(5.0, 7.0)
    assert window is not None
    assert window.busy["read"] == pytest.approx(1.5 + 0.25 + 0.5)
    assert window.moved["read"] == 5 * made_up.PAGE


@pytest.mark.parametrize("seed", range(30))
def test_no_window_beats_the_bound(seed: int) -> None:
    """See windows.py, Note [No window beats the bound]: whatever was measured beforehand, whatever
    the steps were like, and whichever windows are judged."""
    rng, clock = random.Random(seed), Clock(seed)
    mode = rng.choice([None, "keep", "recompute"])
    paper = made_up_plan(rng.choice([70, 200]), rng.choice([100, 400]), activation=mode)
    costs = made_up_costs()
    for name in (*windows.SPEED_OF.values(), "compute_scale"):
        setattr(costs, name, getattr(costs, name) * 10.0 ** rng.uniform(-3, 1))
    costs.slow = {a: {b: rng.uniform(0.05, 1.0) for b in LANES if b != a} for a in LANES}
    costs.landing_waits = rng.random() < 0.5
    found, pace, seen = Windows(), Pace(), []
    for _ in range(3):
        kind = {
            "factor": 10.0 ** rng.uniform(-1, 1), "moved": 10.0 ** rng.uniform(-3, 1),
            "gap": rng.choice([0.0, 1.0]),
        }  # fmt: skip
        seen.append(filled(clock, found, **kind))
        pace = better(pace, pace_of(seen[-1], paper))
        bound = lower_bound(paper, costs, pace)
        for window in seen:
            assert 0 < bound.seconds <= window.step_seconds * (1 + 1e-9)
            for lane, seconds in bound.lane_seconds.items():
                assert seconds <= window.step_seconds * (1 + 1e-9), lane
        assert found.judged is not None
        assert bound.seconds <= found.judged.step_seconds * (1 + 1e-9)


def test_a_step_that_keeps_may_lack_uses_of_one_that_recomputes() -> None:
    forward, backward = (0, False), (0, True)
    times = Times(((1, False), (1, True)), [1.0, 2.0], [0.1, 0.2], 0.3)
    known = (forward, (1, False), (1, True), backward)
    assert times.along(known) == ([0.0, 1.0, 2.0, 0.0], [0.0, 0.1, 0.2, 0.0], 0.3)
    assert times.along(((1, False), backward)) is None


def following(paper: _core.PaperPlan) -> tuple[Following, ShapeClass]:
    """A plan that a run has just begun to follow."""
    made, found = Following(), ShapeClass(((1, 8),), made_up_trace())
    made.costs = made_up_costs()
    made.begin(found, paper)
    return made, found


def percent(made: Following, found: ShapeClass) -> float:
    judged = found.windows.judged
    assert judged is not None
    return 100 * made.bound(found).seconds / judged.step_seconds


def test_a_cold_start_is_forgotten() -> None:
    """The plan was made from steps ten times as slow as those that follow."""
    cold = made_up_trace()
    for use in cold.uses:
        use.seconds *= 10
    wishes = _core.Wishes(on_device=[False] * UNITS)
    paper = _core.PaperPlan(cold, made_up_costs(), made_up_budgets(), wishes)
    made, found = following(paper)
    clock = Clock()
    promised = found.predicted_seconds
    for _ in range(3):
        made.note(found, *clock.step())
    assert 0 < percent(made, found) <= 100, "judged by what there is"
    while not found.windows.closed:
        made.note(found, *clock.step())
    assert 50 < percent(made, found) <= 100
    assert found.predicted_seconds < promised / 5
    assert made.differs(found), "another plan may be better now"
    assert not made.worth(found, found.paper), "this one is as good as it"  # type: ignore[arg-type]
    assert not made.differs(found), "and is not looked for again"
    assert found.trace is not None
    assert found.trace.uses[0].seconds < cold.uses[0].seconds / 5


def test_predictions_follow_steps_that_become_slower() -> None:
    made, found = following(made_up_plan())
    clock = Clock()
    before = found.predicted_seconds
    for factor in (1.0, 2.0):
        found.windows.closed.clear()
        closed = len(found.windows.closed)
        while len(found.windows.closed) == closed:
            made.note(found, *clock.step(factor))
    assert found.paper is not None
    computed = found.paper.simulate().lanes["compute"].busy_seconds
    assert computed == pytest.approx(2 * (UNITS * 0.03 + 0.001), rel=0.02)
    assert found.predicted_seconds > REPLAN_FACTOR * before
    assert percent(made, found) <= 100


def test_what_links_reached_counts_from_then_on() -> None:
    costs = made_up_costs()
    assert raised(costs, {"read_bytes_s": 1.0}) == costs
    assert raised(costs, {"read_bytes_s": 1e12}).read_bytes_s == 1e12
    without = costs.replace(read_bytes_s=0.0)
    assert raised(without, {"read_bytes_s": 1e12}) == without, "there is no SSD"
    window = Window(3, 6.0, 1.0, dict.fromkeys(LANES, 2.0), dict.fromkeys(LANES, 1e9), None)
    pace = pace_of(window, made_up_plan(host=100))
    assert pace.rates["read_bytes_s"] == 0.5e9
    other = better(pace, Pace(rates={"read_bytes_s": 1e9}))
    assert other.rates["read_bytes_s"] == 1e9


def test_what_limits_a_step_is_said() -> None:
    everything = Setting(ssd=True, state="float32", spare_processors=4)
    slow = made_up_costs().replace(update_elements_s=1e6)
    text = limiting_sentence(made_up_plan(host=100), slow, everything)
    assert text.startswith("limited by the optimizer (twice as fast it would save ")
    assert "state_dtype='8bit' (which loses bits), update='in_backward' or two more" in text
    assert "a faster SSD" in text.split("would help")[1]
    slow = made_up_costs().replace(read_bytes_s=1e7, write_bytes_s=1e7)
    text = limiting_sentence(made_up_plan(host=100), slow, everything)
    assert text.startswith("limited by the SSD")
    assert text.endswith("processor, more workers or a faster link to the device would not")
    fast = made_up_costs().replace(
        upload_bytes_s=1e12, download_bytes_s=1e12, update_elements_s=1e12, transfer_seconds=0.0
    )
    text = limiting_sentence(made_up_plan(), fast, replace(everything, ssd=False))
    assert text.startswith("limited by computation (twice as fast it would save ")
    assert "SSD" not in text


def readme_model(**more: Any) -> Any:
    """The README's own example."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=256,
        )
    )  # fmt: skip
    memory = {"device": "1MiB", "host": "4MiB", "ssd": "64MiB"}
    return strata.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), memory=memory, **more)


def readme_steps(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        batch = torch.randint(256, (1, 32))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("update_elements_s", [1e9, 1e5])
def test_the_example_of_the_readme_keeps_its_bound(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, update_elements_s: float
) -> None:
    """Also where what was measured beforehand is far too low, and with many windows."""
    known: Any = strata._profiling.calibrate.costs(None)  # type: ignore[arg-type]
    monkeypatch.setattr(
        strata._profiling.calibrate, "costs",
        lambda *args, **more: known.replace(update_elements_s=update_elements_s),
    )  # fmt: skip
    model, optimizer = readme_model(ssd_path=tmp_path)
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 0.05)
    readme_steps(model, optimizer, 6)
    planning: Any = wrapped(model).planning
    timed = [use.seconds for use in planning.trace.uses]
    for _ in range(4):
        readme_steps(model, optimizer, 4)
        report = strata.report(model)
        assert report.percent_of_bound is not None
        assert 0 < report.percent_of_bound <= 100
        assert report.judged is not None
        assert report.limited.startswith("limited by ")
        assert report.limited in str(report)
    assert [use.seconds for use in planning.trace.uses] != timed, "times follow steps"
    strata.unwrap(model)


def test_a_short_run_says_that_it_is_short(core: ModuleType) -> None:
    model = build(llama)
    room = {"device": "64MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(
        model, adamw(model), memory=room, page_size="64KiB", activations="auto"
    )
    train(model, optimizer, 3)
    assert strata.report(model).percent_of_bound is None, "nothing ran under the plan yet"
    train(model, optimizer, 4)
    report = strata.report(model)
    assert "too short to say much" in str(report)
    assert report.percent_of_bound is not None
    assert 0 < report.percent_of_bound <= 100
    assert wrapped(model).planning is not None
    strata.unwrap(model)
