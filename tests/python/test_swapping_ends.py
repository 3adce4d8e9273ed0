"""Swapped tensors that end at a bad moment, and exceptions out of signal handlers."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from small_models import build
from stacks import Blocks
from strata._activations import swapping
from strata._activations.swapped import Flight
from strata._runtime.wrapped import Wrapped
from swapped_models import is_idle, make_swapping, recipes

pytestmark = pytest.mark.parametrize("core", ["fake"], indirect=True)

INTERRUPTS = 60  # spread over the bytecodes of a step in these:
COPYING = ("_start", "_has_left", "_want", "_land", "_drop_forgotten", "poll")


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


def one_unit() -> Wrapped:
    return make_swapping(recipes(lambda self, x: self.outer(self.inner(x)), 1))[2]


def away(state: Wrapped) -> Any:
    """A view of a tensor that has left the device."""
    view = state.hooks.swapping.pack(torch.randn(96), state.units[0], object())
    state.hooks.swapping.drain()
    return view


def test_an_end_beside_a_landing(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread lets go of a tensor while another sees its copy done."""

    class Slow(Flight):
        """The other thread runs between two lines of whoever notes the end."""

        __slots__ = ("_forgotten",)

        @property
        def forgotten(self) -> bool:
            return getattr(self, "_forgotten", False)

        @forgotten.setter
        def forgotten(self, value: bool) -> None:
            if value:
                other = threading.Thread(target=land)
                other.start()
                other.join(1)
            self._forgotten = value

    state = one_unit()
    swapped = state.hooks.swapping
    there = [False]
    session: Any = state.session
    monkeypatch.setattr(swapping, "Flight", Slow)
    fetched = session.activation_fetched
    monkeypatch.setattr(
        session,
        "activation_fetched",
        lambda save, wait: (there[0] or wait) and fetched(save, True),
        raising=False,
    )

    def land() -> None:
        there[0] = True
        swapped.poll()

    view = away(state)
    swapped._want(view.record)  # its copy is under way
    del view
    land()
    assert swapped.drain() == 0
    assert not session.saves


def test_an_end_within_a_call_of_the_core(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core is not called again from within: Python's collector may run there."""
    state = one_unit()
    views = [away(state) for _ in range(3)]
    session: Any = state.session
    inside, nested = [0], [0]

    def watch(name: str) -> None:
        call = getattr(session, name)

        def watched(*args: Any, **more: Any) -> Any:
            nested[0] += inside[0]
            inside[0] += 1
            views[1:] = []
            try:
                return call(*args, **more)
            finally:
                inside[0] -= 1

        monkeypatch.setattr(session, name, watched, raising=False)

    for name in ("save_activation", "drop_activation", "fetch_activation", "activation_saved"):
        watch(name)
    views.append(away(state))
    assert torch.equal(
        state.hooks.swapping.unpack(views[0]),
        views[0].over(views[0].record.storage, views[0].record.base),
    )
    views.clear()
    assert state.hooks.swapping.drain() == 0
    assert nested == [0]
    assert not session.saves


@contextmanager
def interrupted_at(moment: int) -> Iterator[list[int]]:
    """KeyboardInterrupt at a bytecode where copies begin and end, counted from 0. Yields how many
    have run."""
    count = [0]

    def at_bytecode(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            count[0] += 1
            if count[0] == moment + 1:
                raise KeyboardInterrupt
        return at_bytecode

    def at_call(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename != swapping.__file__ or code.co_name not in COPYING:
            return None
        frame.f_trace_opcodes = True
        return at_bytecode

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield count
    finally:
        sys.settrace(before)


def one_step(model: torch.nn.Module) -> None:
    model(torch.ones(3, 48)).sum().backward()


def test_an_interrupt_between_any_two_bytecodes(core: ModuleType) -> None:
    """Behind it nothing is lost, and the next step is as if it had not been."""
    model, optimizer, state = make_swapping(build(lambda: Blocks(2)))
    with interrupted_at(-1) as ran:
        one_step(model)
    optimizer.zero_grad()
    for moment in range(0, ran[0], max(1, ran[0] // INTERRUPTS)):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(moment):
            one_step(model)
        state.hooks.reset()
        assert state.hooks.swapping.drain() == 0 or is_idle(state), moment
        assert not state.session.saves, moment  # type: ignore[attr-defined]
        optimizer.zero_grad()
    one_step(model)
    assert is_idle(state)
