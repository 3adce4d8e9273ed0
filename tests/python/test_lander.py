"""Gradients that land on a thread of their own: the same bits as at once, and nothing is lost."""

import gc
import signal
import threading
import time
import weakref
from types import ModuleType
from typing import Any

import pytest
import strata
import strata._runtime.wrapped as wrapped_module
import torch
from small_models import adamw, assert_same, batch, build, llama, tight, train
from strata._planning.trace_of import add_under_way
from strata._runtime.lander import Inline, Lander
from strata._runtime.wrapped import wrapped

HOST = torch.device("cpu")
AHEAD = 1 << 20


@pytest.fixture
def lander():
    made = Lander(HOST, AHEAD)
    yield made
    made.close()


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped models land aside, as they do on a GPU."""
    monkeypatch.setattr(wrapped_module, "Inline", lambda: Lander(HOST, AHEAD))


def test_landings_happen_in_order_and_in_turn(lander: Lander) -> None:
    done: list[int] = []
    threads = set()

    def land(number: int) -> None:
        threads.add(threading.current_thread())
        time.sleep(0.001)
        done.append(number)

    for number in range(20):
        lander.put(lambda stream, number=number: land(number))
    lander.wait()
    assert done == list(range(20))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def waits(lander: Lander, byte_count: int) -> bool:
    """Whether a landing of so many bytes has to wait for others."""
    put = threading.Event()

    def late() -> None:
        lander.put(lambda stream: None, byte_count)
        put.set()

    threading.Thread(target=late, daemon=True).start()
    return not put.wait(0.05)


def test_any_number_of_small_ones_may_be_on_their_way(lander: Lander) -> None:
    gate = threading.Event()
    for _ in range(100):
        lander.put(lambda stream: gate.wait() and None, 4096)
    assert not waits(lander, AHEAD - 100 * 4096)
    assert waits(lander, 1)
    gate.set()
    lander.wait()
    assert not waits(lander, 1)


def test_what_is_larger_than_all_that_may_be_under_way_is_waited_for(lander: Lander) -> None:
    gate, put = threading.Event(), threading.Event()
    lander.put(lambda stream: None, AHEAD)

    def large() -> None:
        lander.put(lambda stream: gate.wait() and None, AHEAD + 1)
        put.set()

    threading.Thread(target=large, daemon=True).start()
    assert not put.wait(0.05)
    lander.put(lambda stream: None)  # what holds nothing never waits
    gate.set()
    assert put.wait(300)


def test_what_a_landing_raises_is_told_once_and_ends_those_behind_it(lander: Lander) -> None:
    gate, done = threading.Event(), []

    def fail(stream: int) -> None:
        gate.wait()
        raise ValueError("the disk is gone")

    lander.put(fail)
    lander.put(lambda stream: done.append("behind"))
    gate.set()
    with pytest.raises(ValueError, match="the disk is gone"):
        lander.wait()
    lander.wait()
    assert done == []
    lander.put(lambda stream: done.append("later"))
    lander.wait()
    assert done == ["later"]


def test_the_next_landing_is_told_too(lander: Lander) -> None:
    def fail(stream: int) -> None:
        raise ValueError("the disk is gone")

    lander.put(fail)
    while lander._error is None:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="the disk is gone"):
        lander.put(lambda stream: None)


def test_an_interrupt_while_waiting_leaves_the_rest_to_be_done(
    lander: Lander, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, done = threading.Event(), []
    lander.put(lambda stream: gate.wait() and None)
    lander.put(lambda stream: done.append(1))

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(strata._runtime.lander, "PATIENCE_S", 0.01)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        lander.wait()
    signal.signal(signal.SIGALRM, before)
    gate.set()
    lander.wait()
    assert done == [1]


def test_a_closed_lander_takes_nothing(lander: Lander) -> None:
    lander.close()
    with pytest.raises(RuntimeError, match="not wrapped any more"):
        lander.put(lambda stream: None)
    lander.close()


def test_a_gradient_is_held_until_it_has_landed_and_no_longer(lander: Lander) -> None:
    gate, grad = threading.Event(), torch.ones(4)
    alive = weakref.ref(grad)
    lander.put(lambda stream, grad=grad: gate.wait() and None)
    del grad
    gc.collect()
    assert alive() is not None
    gate.set()
    lander.wait()
    assert alive() is None


MODES: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "units clipped": {"max_unit_norm": 0.05},
    "in_backward": {"update": "in_backward"},
    "in_backward, units clipped": {"update": "in_backward", "max_unit_norm": 0.05},
    "lock-free": {"update": strata.LockFree(0), "gradient_accumulation_steps": 2},
}


def trained(options: dict[str, Any]) -> Any:
    model, optimizer = tight(build(llama), dtype=torch.bfloat16, **options)
    kind = type(wrapped(model).landings)
    torch.manual_seed(2)
    norms = []
    for _ in range(3):
        for _ in range(options.get("gradient_accumulation_steps", 1)):
            model(**batch(model)).loss.backward()
        optimizer.step()
        norms.append(wrapped(model).steps.last["norm"])
        optimizer.zero_grad()
    return strata.unwrap(model), norms, kind


@pytest.mark.parametrize("name", MODES)
def test_bits_are_the_same(core: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, norms, kind = trained(MODES[name])
    assert kind is Inline
    monkeypatch.setattr(wrapped_module, "Inline", lambda: Lander(HOST, AHEAD))
    later, other_norms, kind = trained(MODES[name])
    assert kind is Lander
    assert other_norms == norms
    assert_same(later, at_once)


def test_whoever_looks_at_a_gradient_waits_for_it(core: ModuleType, aside: None) -> None:
    model, optimizer = tight(build(llama))
    slow_down(model)
    torch.manual_seed(4)
    model(**batch(model)).loss.backward()
    grads = [strata.gather_grad(p) for p in model.parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    optimizer.zero_grad()
    assert all(strata.gather_grad(p) is None for p in model.parameters())
    strata.unwrap(model)


class Slow:
    """A session whose gradients take their time, or fail to land."""

    def __init__(self, session: Any, error: Exception | None) -> None:
        self._session = session
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_session"], name)

    def land_gradient(self, *args: Any, **more: Any) -> None:
        time.sleep(0.002)
        if self._error is not None:
            raise self._error
        self._session.land_gradient(*args, **more)


def slow_down(model: torch.nn.Module, error: Exception | None = None) -> None:
    state = wrapped(model)
    state.session = Slow(state.session, error)  # type: ignore[assignment]


def test_a_failure_reaches_the_next_call(core: ModuleType, aside: None) -> None:
    model, optimizer = tight(build(llama))
    slow_down(model, strata.StrataError("the disk is gone"))
    with pytest.raises(strata.StrataError, match="the disk is gone"):
        train(model, optimizer, steps=1)  # in the backward, or at step()
    strata.unwrap(model)


def test_a_thread_ends_with_its_model(core: ModuleType, aside: None) -> None:
    model, _ = tight(build(llama))
    (thread,) = (t for t in threading.enumerate() if t.name == "strata-lander")
    strata.unwrap(model)
    assert not thread.is_alive()
    model, optimizer = tight(build(llama))
    (thread,) = (t for t in threading.enumerate() if t.name == "strata-lander")
    model(**batch(model)).loss.backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    assert not thread.is_alive()


def planned(core: ModuleType) -> Any:
    memory = {"device": "64MiB", "host": "64MiB"}
    model = build(llama)
    return strata.wrap(model, adamw(model), memory=memory, page_size="64KiB", activations="auto")


def test_nothing_is_under_way_in_a_step_that_is_recorded(
    core: ModuleType, aside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = planned(core)
    slow_down(model)
    state, put, left = wrapped(model), Lander.put, {True: 0, False: 0}

    def looking(lander: Lander, *args: Any) -> None:
        undone = sum(not one.done for one in lander._under_way if one.bytes)
        left[state.recorder.recording] += undone
        put(lander, *args)

    monkeypatch.setattr(Lander, "put", looking)
    train(model, optimizer, 4)
    assert left[True] == 0
    assert left[False] > 0
    strata.unwrap(model)


def test_plans_count_what_may_be_under_way(core: ModuleType) -> None:
    model, optimizer = planned(core)
    train(model, optimizer, 2)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.trace is not None
    trace, before = planning.trace, [use.replace() for use in planning.trace.uses]
    tail, grads = trace.tail_peak_bytes, [unit.grad_bytes for unit in trace.units]
    ahead = sum(grads) // 2
    add_under_way(trace, ahead)
    begun = 0
    for use, old in zip(trace.uses, before, strict=True):
        assert use.live_bytes - old.live_bytes == min(ahead, begun)
        begun += grads[use.unit] if use.backward else 0
        assert use.peak_bytes - old.peak_bytes == min(ahead, begun)
    assert trace.tail_peak_bytes - tail == ahead
    strata.unwrap(model)
