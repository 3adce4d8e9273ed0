"""A trial of a second run leaves what forwards change deep in Python's objects as it was, and units
that change it are not computed again."""

import contextvars
import dataclasses
import functools
import itertools
import logging
import queue
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy
import pytest
import torch
from test_run_again import CALLS, WIDTH, Body, Net, again, assert_as_plain, counts_elsewhere, train


@dataclasses.dataclass
class Notes:
    of_all: ClassVar[int] = 0
    calls: int = 0
    by_name: dict[str, list[int]] = dataclasses.field(default_factory=dict)


class Slots:
    __slots__ = ("calls",)


def makes_a_list_later(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "later"):
        self.later: list[int] = []
    self.later.append(1)
    return x + torch.tanh(self.inner(x)) / len(self.later)


def notes_in_an_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    notes = self.__dict__.setdefault("notes", Notes())
    notes.calls += 1
    notes.by_name.setdefault("here", []).append(notes.calls)
    return x + torch.tanh(self.inner(x))


def notes_in_slots(self: Any, x: torch.Tensor) -> torch.Tensor:
    slots = self.__dict__.setdefault("slots", Slots())
    slots.calls = getattr(slots, "calls", 0) + 1
    return x + torch.tanh(self.inner(x)) / slots.calls


def notes_in_a_nested_dict(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.__dict__.setdefault("nested", {"a": {"calls": 0}})["a"]["calls"] += 1
    return x + torch.tanh(self.inner(x))


def adds_to_a_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.__dict__.setdefault("sums", [torch.zeros(1), numpy.zeros(1)])
    self.sums[0] += 1
    self.sums[1][0] += 1
    return x + torch.tanh(self.inner(x))


def draws_from_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    generators = self.__dict__.setdefault("generators", [torch.Generator().manual_seed(1)])
    return x + torch.tanh(self.inner(x + torch.randn(x.shape, generator=generators[0])))


def calls_a_closure(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "count"):
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count
    return x + torch.tanh(self.inner(x)) / self.count()


def counts_in_the_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    Notes.of_all += 1
    return x + torch.tanh(self.inner(x)) * (1 + Notes.of_all % 2)


def cycles(self: Any, x: torch.Tensor) -> torch.Tensor:
    steps = self.__dict__.setdefault("steps", [itertools.cycle([1, 2, 3])])
    return x + torch.tanh(self.inner(x)) / next(steps[0])


DEEP: dict[Body, Callable[[Any], Any]] = {  # what they leave, to be compared
    makes_a_list_later: lambda block: len(block.later),
    notes_in_an_object: lambda block: (block.notes.calls, block.notes.by_name),
    notes_in_slots: lambda block: block.slots.calls,
    notes_in_a_nested_dict: lambda block: block.nested,
    adds_to_a_tensor: lambda block: [float(s[0]) for s in block.sums],
    draws_from_a_list: lambda block: block.generators[0].get_state().tolist(),
    calls_a_closure: lambda block: block.count(),
    counts_in_the_class: lambda _: Notes.of_all,
    counts_elsewhere: lambda _: CALLS[0],
    cycles: lambda _: None,
}


@pytest.mark.parametrize("body", DEEP, ids=lambda body: body.__name__)
def test_a_trial_leaves_what_lies_deep_as_it_was(core: ModuleType, body: Body) -> None:
    """An evaluation first, so that the forward finds what it changes."""

    def evaluate(net: Net) -> None:
        with torch.no_grad():
            net(torch.randn(8, WIDTH))

    Notes.of_all = 0
    expected, plain = train(body, prepare=evaluate)
    left = [DEEP[body](block) for block in plain.blocks]
    Notes.of_all = 0
    found, net = train(body, "recompute", prepare=evaluate)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert [DEEP[body](block) for block in net.blocks] == left
    assert not any(again(net))


def test_a_list_that_is_made_in_the_trial_is_found_in_the_next(core: ModuleType) -> None:
    found, net = train(makes_a_list_later, "recompute")
    assert_as_plain(found, makes_a_list_later)
    assert [len(block.later) for block in net.blocks] == [4, 4, 4]
    assert not any(again(net))


CALL = contextvars.ContextVar("CALL", default=1)
NOTED = contextvars.ContextVar[list[int]]("NOTED")


def sets_a_variable(self: Any, x: torch.Tensor) -> torch.Tensor:
    CALL.set(CALL.get() + 1)
    return x + torch.tanh(self.inner(x)) / CALL.get()


def notes_in_a_variable(self: Any, x: torch.Tensor) -> torch.Tensor:
    NOTED.get().append(1)
    return x + torch.tanh(self.inner(x)) / len(NOTED.get())


@pytest.mark.parametrize("body", [sets_a_variable, notes_in_a_variable])
def test_only_real_runs_change_variables_of_the_context(core: ModuleType, body: Body) -> None:
    found = []
    for activations in (None, "recompute"):
        CALL.set(1)
        NOTED.set([])
        losses, net = train(body, activations)
        found.append((losses, CALL.get(), len(NOTED.get())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert not any(again(net))


def reads_a_variable(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(self.inner(x) / CALL.get())


def test_a_second_run_finds_the_variables_of_the_first(core: ModuleType) -> None:
    """They are set for the forward only."""

    def prepare(net: Net) -> None:
        plain = net.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            token = CALL.set(3)
            try:
                return plain(x)
            finally:
                CALL.reset(token)

        net.forward = forward  # type: ignore[method-assign]

    found, net = train(reads_a_variable, "recompute", prepare=prepare)
    assert_as_plain(found, reads_a_variable, prepare=prepare)
    assert all(again(net))


@functools.lru_cache
def drawn_mask(width: int) -> torch.Tensor:
    return torch.rand(width)


def keeps_what_it_drew(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.drop(torch.tanh(self.inner(x))) * drawn_mask(WIDTH)


def test_a_trial_leaves_the_cache_of_a_function_empty(core: ModuleType) -> None:
    """Else the first real run would not draw, and all later ones would draw other numbers."""
    drawn_mask.cache_clear()
    expected, _ = train(keeps_what_it_drew)
    drawn_mask.cache_clear()
    found, net = train(keeps_what_it_drew, "recompute")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(again(net))


NUMBERS = queue.SimpleQueue[int]()


def takes_from_cpp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(self.inner(x)) / NUMBERS.get()


def test_a_change_that_no_trial_can_undo_is_told_once(
    core: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 100):
        NUMBERS.put(number)
    with caplog.at_level(logging.WARNING, "strata"):
        _, net = train(takes_from_cpp, "recompute")
    (told,) = [r.message for r in caplog.records if "another output" in r.message]
    assert "blocks.0, blocks.1, blocks.2" in told
    assert "twice more" in told
    assert 'activations="keep"' in told
    assert not any(again(net))
