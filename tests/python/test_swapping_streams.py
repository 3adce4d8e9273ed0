"""Swapped tensors on a GPU's streams: Python is ahead of the bytes, and nothing else is.

The double of the core is a GPU in this: its copies are put in order, and are done later.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from strata._activations import swapping
from strata._activations.swapped import Flight
from strata._runtime import streams
from strata._runtime.wrapped import Wrapped
from swapped_models import Counts, is_idle, make_swapping, recipes
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = pytest.mark.parametrize("core", ["fake"], indirect=True)

SIZE = 96  # floats


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


class LateCopies:
    """Copies to the device that are not done until somebody waits for them."""

    def __init__(self, state: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[int] = []
        self.awaits: list[tuple[int, int]] = []  # save, stream
        self.storages: list[StorageWeakRef] = []
        self.swapping = state.hooks.swapping
        session: Any = state.session
        fetched, awaited = session.activation_fetched, session.await_activation

        def activation_fetched(save: int, wait: bool) -> bool:
            if wait:
                self.waits.append(save)
                return bool(fetched(save, True))
            return session.saves[save].fetch_to is None

        def await_activation(save: int, *, stream: int) -> bool:
            self.awaits.append((save, stream))
            return bool(awaited(save, stream=stream))

        def flight(record: Any, storage: torch.UntypedStorage, stream: int) -> Flight:
            self.storages.append(StorageWeakRef(storage))
            return Flight(record, storage, stream)

        monkeypatch.setattr(session, "activation_fetched", activation_fetched, raising=False)
        monkeypatch.setattr(session, "await_activation", await_activation, raising=False)
        monkeypatch.setattr(swapping, "Flight", flight)

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def away(state: Wrapped, values: torch.Tensor) -> Any:
    """A view of a tensor that has left the device. None: there was no room."""
    view = state.hooks.swapping.pack(values.clone(), state.units[0], object())
    state.hooks.swapping.drain()
    return view


def one_unit(**more: Any) -> Wrapped:
    return make_swapping(recipes(lambda self, x: self.outer(self.inner(x)), 1), **more)[2]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a stream the current one; at first it is 7."""
    current = [7]
    monkeypatch.setattr(swapping, "current_stream", lambda device: current[0])
    return lambda chosen: current.__setitem__(0, chosen)


def test_backward_waits_for_no_bytes(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).exp())

    units = 6
    alive: list[int] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            alive.append(late.alive())
            return grad

    model, _, state = make_swapping(recipes(lambda self, x: run(self, Watch.apply(x)), units))
    plain = recipes(run, units)
    late = LateCopies(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    loss = model(x).square().sum()
    state.hooks.swapping.drain()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert not late.waits
    assert len(late.awaits) >= len(late.storages) >= 2 * units - 1
    # Memory is that of the unit and of the one that comes next, however late the copies are.
    assert len(alive) == units
    assert max(alive) <= 2 * -(-len(late.storages) // units)
    assert late.alive() == 0
    del loss
    assert state.hooks.swapping._coming, "nothing has been seen done"
    assert is_idle(state)


def test_memory_is_kept_until_its_own_stream_is_in_order(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, stream: Callable[[int], None]
) -> None:
    told: list[int] = []
    state = one_unit()
    late = LateCopies(state, monkeypatch)
    monkeypatch.setattr(swapping, "keep_until_used", lambda t, device: told.append(t.data_ptr()))
    values = torch.randn(SIZE)
    for awaited in ((8,), (7,), (8, 7)):  # the memory is always of 7
        view = away(state, values)
        late.awaits.clear()
        told.clear()
        stream(7)
        state.hooks.swapping._want(view.record)
        for current in awaited:
            stream(current)
            assert torch.equal(state.hooks.swapping.unpack(view), values)
        assert late.awaits == [(view.record.save, current) for current in awaited]
        assert len(told) == awaited.count(8)
        assert late.alive() == 1
        del view
        assert late.alive() == (7 not in awaited), "its copy has not been seen done"
        assert state.hooks.swapping.drain() == 0
        assert late.alive() == 0
    assert len(late.storages) == 3


def test_what_nobody_asked_for_is_kept_until_its_copy_is_done(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = one_unit()
    late = LateCopies(state, monkeypatch)
    view = away(state, torch.randn(SIZE))
    state.hooks.swapping._want(view.record)
    del view
    state.hooks.swapping.poll()
    assert late.alive() == 1
    assert state.hooks.swapping.drain() == 0
    assert late.alive() == 0


def test_room_that_late_copies_hold_is_waited_for(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = one_unit(room=SIZE * 4)
    late = LateCopies(state, monkeypatch)
    swaps = state.hooks.swapping
    view = away(state, torch.randn(SIZE))
    swaps.unpack(view)
    other = torch.randn(SIZE)
    assert swaps.pack(other, state.units[0], object()) is None, "it may be wanted again"
    assert not late.waits
    assert swaps.kept_for_room == 1
    del view
    assert swaps.pack(other, state.units[0], object()) is not None
    assert len(late.waits) == 1
    assert swaps.kept_for_room == 1


def test_waits_of_the_stream_are_no_computation(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = one_unit()
    counts = Counts(state, monkeypatch)
    pauses: list[object] = []
    paused = state.recorder.paused
    monkeypatch.setattr(state.recorder, "paused", lambda: pauses.append(None) or paused())
    view = away(state, torch.randn(SIZE))
    state.hooks.swapping.unpack(view)
    assert len(pauses) == 1
    state.hooks.swapping.drain()
    state.hooks.swapping.unpack(view)  # it is there
    assert len(pauses) == len(counts.fetches) == 1


def test_the_allocator_is_told_of_the_current_stream(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    current = object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    tensor: Any = SimpleNamespace(record_stream=told.append)
    streams.keep_until_used(tensor, torch.device("cuda", 0))
    assert told == [current]
