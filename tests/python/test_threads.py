"""Several threads use one wrapped model: what one of them gives up, or is in the middle of, is none
of the others' affair."""

import _thread
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import adamw, assert_same, build, tight
from stacks import Blocks, steps
from strata import StrataError
from strata._planning.planning import TIMED_STEPS
from strata._runtime.visits import Visit, Visits
from strata._runtime.wrapped import wrapped
from torch import nn

SECONDS = 10
PLANNED_AFTER = 1 + TIMED_STEPS
pytestmark = pytest.mark.parametrize("core", ["real"], indirect=True)  # the double has no lock


@contextmanager
def beside(act: Callable[[], Any]) -> Iterator[None]:
    """Another thread acts meanwhile; what it raises is raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


class Meeting:
    """A place where one thread stands still while another one acts."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def stand(self, *_: Any) -> None:
        self.inside.set()
        assert self.go_on.wait(SECONDS)


def roomy(model: nn.Module, **more: Any) -> Any:
    """Wrapped, with room for the units of two threads."""
    return tight(model, memory={"device": "4MiB", "host": "64MiB"}, page_size="64KiB", **more)


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.zeros(3, 48))
    return out


def give_up(model: nn.Module) -> None:
    """A forward that an exception ends, where torch calls no hook behind a module."""

    def raise_there(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1][1].register_forward_pre_hook(raise_there)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model)
    handle.remove()


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 48, generator=torch.Generator().manual_seed(7))).square().mean()


def test_a_step_counts_once(core: ModuleType) -> None:
    model, optimizer = roomy(build(Blocks))
    state = wrapped(model)
    meeting, note_step = Meeting(), state.steps.note

    def note_later(result: Any) -> None:
        meeting.stand()
        note_step(result)

    state.steps.note = note_later  # type: ignore[method-assign]
    loss_of(model).backward()
    with beside(optimizer.step):
        assert meeting.inside.wait(SECONDS)
        give_up(model)
        evaluate(model)
        meeting.go_on.set()
    assert state.steps.count == 1
    assert not any(map(state.gradients.has_landed, range(len(state.params))))
    del state.steps.note
    optimizer.zero_grad()
    steps(model, optimizer)
    assert state.steps.count == 4


def test_a_forward_that_is_given_up_leaves_the_backward_of_another_thread(
    core: ModuleType,
) -> None:
    plain = build(Blocks)
    inner = adamw(plain)
    model = build(Blocks)
    meeting = Meeting()
    # Ahead of strata's: autograd has completed the gradient, and the core has not got it.
    model.blocks[2][0].weight.register_post_accumulate_grad_hook(meeting.stand)
    model, optimizer = roomy(model)
    with beside(lambda: loss_of(model).backward()):
        assert meeting.inside.wait(SECONDS)
        give_up(model)
        evaluate(model)
        meeting.go_on.set()
    state = wrapped(model)
    assert all(map(state.gradients.has_landed, range(len(state.params))))
    optimizer.step()
    loss_of(plain).backward()
    inner.step()
    assert_same(model, plain, 1e-6)


def test_an_evaluation_that_is_given_up_stays_out_of_the_record(core: ModuleType) -> None:
    model, optimizer = roomy(build(Blocks))
    recorder = wrapped(model).recorder
    meeting = Meeting()
    handle = model.blocks[2][0].register_forward_pre_hook(meeting.stand)
    model.eval()  # an evaluation is not recorded then
    recorder.begin()
    with beside(lambda: loss_of(model).backward()):
        assert meeting.inside.wait(SECONDS)
        handle.remove()
        give_up(model)
        evaluate(model)
        meeting.go_on.set()
    step = recorder.take()
    assert step.detailed
    forwards = [use.unit for use in step.uses if not use.backward]
    assert sorted(set(forwards)) == list(range(len(wrapped(model).units)))
    optimizer.step()


def test_a_plan_waits_for_the_forward_of_another_thread(core: ModuleType) -> None:
    """Who comes in the middle of step() is no reason for it to raise."""
    plain = build(Blocks)
    expected = steps(plain, adamw(plain), 5)
    model, optimizer = roomy(build(Blocks), activations="auto")
    model.eval()  # as in the test before
    state = wrapped(model)
    planning, note_step = state.planning, state.steps.note
    assert planning is not None
    meeting = Meeting()
    slow = threading.Thread(target=lambda: evaluate(model))

    def come(result: Any) -> None:
        note_step(result)
        if state.steps.count == PLANNED_AFTER:
            handle = model.blocks[1][1].register_forward_pre_hook(meeting.stand)
            slow.start()
            assert meeting.inside.wait(SECONDS)
            handle.remove()

    state.steps.note = come  # type: ignore[method-assign]
    losses = []
    torch.manual_seed(1)
    for step in range(1, 6):
        loss = model(torch.randn(3, 48)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if step == PLANNED_AFTER + 1:
            assert planning.plan is not None
            assert planning._in_use is None, "the other thread is in its forward still"
            meeting.go_on.set()
            slow.join(SECONDS)
        optimizer.step()
        optimizer.zero_grad()
    assert planning._in_use is planning.current
    assert losses == pytest.approx(expected, rel=1e-6)


def test_visits_are_sorted_out_while_others_end_theirs(core: ModuleType) -> None:
    visits, ended = Visits(), threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            mine = [visits.add(Visit()) for _ in range(500)]
            for visit in mine:
                visits.end(visit)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(6000):
            bound, live = visits.sort_out()
            visits.among(live)
            visits.over(bound, live)
    finally:
        ended.set()
        other.join()
        sys.setswitchinterval(usual)


def test_a_model_that_a_thread_of_others_collects_is_closed_by_another(core: ModuleType) -> None:
    """The core's own threads run Python, and its garbage collection; who closes waits for them."""
    model, optimizer = tight(build(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))))
    session = wrapped(model).session
    closed: list[str] = []
    wrapped(model).after_close.append(lambda: closed.append(threading.current_thread().name))
    del model, optimizer
    done = threading.Event()
    _thread.start_new_thread(lambda: (gc.collect(), done.set()), ())  # type: ignore[arg-type]
    assert done.wait(SECONDS)
    for thread in threading.enumerate():
        if thread.name == "strata-close":
            thread.join(SECONDS)
    assert closed == ["strata-close"]
    with pytest.raises(StrataError, match="closed"):
        session.drain()
