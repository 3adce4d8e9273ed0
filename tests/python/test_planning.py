"""Planned steps: the same bits in every mode and under every budget that works, the smallest device
that would do, batches of many shapes, and disks that become slow.
"""

import gc
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import MODELS, VOCABULARY, adamw, assert_same, batch, build, train
from strata._config.sizes import parse_size
from strata._errors import StrataError
from strata._profiling.windows import Window
from strata._runtime.wrapped import wrapped
from torch import nn
from variants import thorough

ROOM = {"device": "64MiB", "host": "64MiB"}
STEPS = 6  # one recorded, two timed, one measured, and then some


def planned(name: str, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(MODELS[name])
    return strata.wrap(
        model, adamw(model), **{"memory": ROOM, "page_size": "64KiB", "activations": "auto", **more}
    )


def planning(model: nn.Module) -> Any:
    return wrapped(model).planning


def modes(model: nn.Module) -> set[str]:
    return {unit.activation for unit in wrapped(model).units}


@pytest.mark.parametrize("name", MODELS)
def test_every_mode_gives_the_same_bits(core: ModuleType, name: str) -> None:
    model, optimizer = planned(name, activations=None)
    expected = train(model, optimizer, STEPS)
    plain = strata.unwrap(model)
    for mode in ("keep", "swap", "recompute", "auto"):
        model, optimizer = planned(name, activations=mode)
        assert train(model, optimizer, STEPS) == expected, mode
        assert planning(model).plan is not None
        if mode == "swap":
            assert "swap_host" in modes(model)
        elif mode == "recompute":
            assert "recompute" in modes(model)
        else:
            assert modes(model) == {"keep"}, "there is room for everything"
        strata.unwrap(model)
        assert_same(model, plain)


def test_the_smallest_budget_that_would_do_does(core: ModuleType) -> None:
    model, optimizer = planned("llama")
    expected = train(model, optimizer, STEPS)
    smallest = planning(model).plan.device_bytes_min
    strata.unwrap(model)
    small, optimizer = planned("llama", memory={**ROOM, "device": smallest + (64 << 10)})
    assert train(small, optimizer, STEPS) == expected
    peak = planning(small).plan.peaks["device"]
    assert peak.bytes <= peak.budget
    strata.unwrap(small)


def test_a_budget_that_cannot_work_is_refused_with_one_that_does() -> None:
    """On the real core: the double's own tensors would be taken for activations."""
    model, optimizer = planned("llama", activations="recompute")
    expected = train(model, optimizer, STEPS)
    smallest = planning(model).plan.device_bytes_min
    strata.unwrap(model)
    memory = {**ROOM, "device": smallest - 4096}
    model, optimizer = planned("llama", activations="recompute", memory=memory)
    with pytest.raises(StrataError, match="infeasible: device") as caught:
        train(model, optimizer, 1)
    strata.unwrap(model)
    found = re.search(r"; ([\d.]+ [KM]iB) would do", str(caught.value))
    assert found is not None
    # A few small allocations differ from run to run.
    memory["device"] = parse_size(found[1]) + (16 << 10)
    model, optimizer = planned("llama", activations="recompute", memory=memory)
    assert train(model, optimizer, STEPS) == expected
    strata.unwrap(model)


def test_split_is_forced_and_equal_within_rounding(core: ModuleType) -> None:
    model, optimizer = planned("llama", activations=None)
    expected = train(model, optimizer, STEPS)
    strata.unwrap(model)
    runs = []
    for _ in range(2):
        model, optimizer = planned("llama", split=2)
        runs.append(train(model, optimizer, STEPS))
        assert 2 in {u.slices for u in wrapped(model).units}
        strata.unwrap(model)
    assert runs[0] == runs[1]
    assert runs[0] == pytest.approx(expected, rel=1e-5)


def test_batches_of_many_lengths_are_served_without_thrashing(core: ModuleType) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(3)
        losses = []
        for _ in range(50):
            length = int(torch.randint(4, 40, ()))
            tokens = torch.randint(0, VOCABULARY, (2, length))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = planned("llama", activations=None)
    expected = run(model, optimizer)
    strata.unwrap(model)
    model, optimizer = planned("llama")
    calls = []
    session = wrapped(model).session
    wrapped(model).session = Counted(session, calls)
    assert run(model, optimizer) == expected
    assert len(planning(model).classes) <= 16
    assert len(calls) <= 8, "frames are planned anew only while the batches still grow"
    strata.unwrap(model)


class Counted:
    """A session that notes how often it takes something over from plans."""

    def __init__(self, session: Any, calls: list[int]) -> None:
        self._session = session
        self._calls = calls

    def adopt(self, *args: Any) -> None:
        self._calls.append(len(self._calls))
        self._session.adopt(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.mark.parametrize(("rounds", "declared"), [(1, 1), (2, 2), (2, 1)])
def test_parameters_come_in_the_plans_order(rounds: int, declared: int) -> None:
    """On the real core, which counts the uses that its plan did not foresee."""
    memory = {"device": "1MiB", "host": "64MiB"}
    # As in the recorded step: units that are kept have uses less in their backward.
    chosen = {"activations": "recompute", "gradient_accumulation_steps": declared}
    model, optimizer = planned("llama", memory=memory, **chosen)
    session = wrapped(model).session

    def step() -> tuple[int, int]:
        for _ in range(rounds):
            model(**batch(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return session.stats()["plans"], session.stats()["deviations"]

    before = [step() for _ in range(3)][-1]  # one recorded, two timed, and then the plan
    order = planning(model).claims._order
    assert [use[:2] for use in order] == rounds * [
        (use.unit, use.backward) for use in planning(model).trace.uses
    ]
    assert [step() for _ in range(3)][-1] == before, "from the first step under the plan on"
    strata.unwrap(model)


def test_evaluation_between_planned_steps(core: ModuleType) -> None:
    results = []
    for mode in (None, "recompute", "swap"):
        model, optimizer = planned("gpt2", activations=mode)
        losses = []
        torch.manual_seed(2)
        for _ in range(STEPS):
            losses += train(model, optimizer, 1, seed=len(losses))
            model.eval()
            with torch.no_grad():
                losses.append(model(**batch(model)).loss.item())
            model.train()
        results.append(losses)
        strata.unwrap(model)
    assert results[0] == results[1] == results[2]


def test_a_users_checkpointing_inside_planned_units(core: ModuleType) -> None:
    results = []
    for mode in (None, "keep", "swap", "recompute"):
        model, optimizer = planned("llama", activations=mode)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(train(model, optimizer, STEPS))
        strata.unwrap(model)
    assert all(losses == results[0] for losses in results)


@pytest.mark.parametrize("mode", ["auto", "keep", "swap", "recompute", "split"])
@pytest.mark.parametrize("name", ["llama", thorough("t5")])
def test_no_tensor_waits_for_the_garbage_collector(core: ModuleType, name: str, mode: str) -> None:
    """Activations that lie in a reference cycle stay until Python looks for one."""
    model = build(MODELS[name])
    chosen: dict[str, Any] = {"split": 2} if mode == "split" else {"activations": mode}
    memory = {"device": "1MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(model, adamw(model), memory=memory, page_size="64KiB", **chosen)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train(model, optimizer, 5)
        gc.collect()
        assert [tuple(o.shape) for o in gc.garbage if isinstance(o, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("declared", [thorough(1), 2])
def test_several_backwards_per_step(core: ModuleType, declared: int) -> None:
    results = []
    for mode in (None, "auto", "swap", "recompute"):
        chosen = {"activations": mode, "gradient_accumulation_steps": declared}
        model, optimizer = planned("llama", **chosen)
        torch.manual_seed(4)
        losses = []
        for _ in range(STEPS):
            for _ in range(2):
                loss = model(**batch(model)).loss
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses)
        strata.unwrap(model)
    assert all(losses == results[0] for losses in results)


@pytest.mark.parametrize("rows", [(1, 4), (1, 1, 4), (1, 4, 4), (4, 1), (4, 4, 3), (1, 4, 2, 1)])
def test_a_step_of_batches_large_and_small_is_recorded_once(
    core: ModuleType, rows: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    model, optimizer = strata.wrap(model, adamw(model), memory=ROOM, page_size="64KiB")
    with caplog.at_level(logging.INFO, "strata"):
        for _ in range(STEPS):
            for count in rows:
                model(torch.randn(count, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum("recording a step" in record.message for record in caplog.records) == 1
    (found,) = planning(model).classes
    assert found.shape == ((4, 64),)
    assert found.plan is not None
    assert found.trace is not None
    assert {t.bytes for t in found.trace.tensors} == {4 * 64 * 4}, "of the largest batch"


def test_a_step_is_recorded_for_a_batch_that_came_in_the_middle_of_the_one_before() -> None:
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    model, optimizer = strata.wrap(model, adamw(model), memory=ROOM, page_size="64KiB")
    for rows in [(1, 1)] * 4 + [(1, 4)] * 4:
        for count in rows:
            model(torch.randn(count, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [c.shape for c in planning(model).classes if c.plan] == [((1, 64),), ((4, 64),)]


def test_units_that_cannot_come_to_rest_now_get_frames(core: ModuleType) -> None:
    """The plan needs none, for it has all units on the device; gradients have landed meanwhile."""
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    model, optimizer = strata.wrap(model, adamw(model), memory=ROOM, page_size="64KiB")
    model(torch.randn(4, 64)).square().mean().backward()
    claims = planning(model).claims
    units = [True] * len(claims.resting)
    assert claims.take(units, 0, 0, 0)
    assert not any(claims.resting)
    optimizer.step()
    assert claims.take(units, 0, 0, 0)
    assert all(claims.resting)


def test_a_disk_that_became_slow_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    memory = {"device": "1MiB", "host": "1MiB", "ssd": "256MiB"}
    model, optimizer = planned("llama", memory=memory, ssd_path=tmp_path)
    train(model, optimizer, STEPS)
    plans = planning(model)
    measured = []
    costs = strata._planning.planning.calibrate.costs
    monkeypatch.setattr(
        strata._planning.planning.calibrate,
        "costs",
        lambda *a, **k: (measured.append(k), costs(*a, **k))[1],
    )

    def windows(count: int, factor: float) -> int:
        """Of steps that take so many times as long as predicted. Returns how often it measured."""
        for _ in range(count):
            seconds = factor * plans.current.predicted_seconds
            nothing = dict.fromkeys(("upload", "download", "read", "write", "update"), 0.0)
            window = Window(10, 10 * seconds, seconds, nothing, nothing, None)
            plans._judge(plans.current, window)
        return len(measured)

    assert windows(3, 1.2) == 0
    assert windows(1, 2.0) == 1
    assert "planned anew" in caplog.text
    assert windows(1, 2.0) == 1, "each time takes seconds: it waits twice as long for the next"
    assert windows(1, 2.0) == 2
    assert windows(3, 2.0) == 2
    assert windows(1, 2.0) == 3
    strata.unwrap(model)


def test_a_disk_that_nothing_moves_over_is_not_suspected(
    core: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is slow for another reason must not be held up by measuring."""
    monkeypatch.setattr(strata._profiling.windows, "WINDOW_SECONDS", 0.0)
    memory = {"device": "64MiB", "host": "64MiB", "ssd": "256MiB"}
    model, optimizer = planned("llama", memory=memory, ssd_path=tmp_path)
    train(model, optimizer, STEPS)
    monkeypatch.delattr(strata._planning.planning.calibrate, "costs")
    monkeypatch.setattr(strata._planning.planning, "SLOW_FACTOR", 1e-9)
    train(model, optimizer, 9)
    assert planning(model).judged.whole
    strata.unwrap(model)


def test_modes_that_make_no_sense_are_refused() -> None:
    for wrong in ({"activations": "swop"}, {"split": 1}, {"split": 2, "activations": "keep"}):
        with pytest.raises(ValueError, match=r"activations|split"):
            planned("llama", **wrong)
