"""Forwards run as often as they are called, unless memory is needed. Then a trial shows first
whether a second run gives the same, and what may not run again keeps its activations."""

import logging
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest
import strata
import torch
from strata._config.choices import RECOMPUTES
from strata._planning.recording import Recording
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn.utils import prune

WIDTH = 32
Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A layer with state in Python, which `body` uses."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.body = body
        self.calls = 0
        self.temperature = 2.0
        self.generator = torch.Generator().manual_seed(1)
        self.dice = random.Random(1)
        self.numbers = numpy.random.default_rng(1)
        self.history: list[float] = []
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x + torch.tanh(self.inner(x)) / self.calls


def anneals(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.temperature = max(0.5, self.temperature * 0.9)
    return x + torch.tanh(self.inner(x) / self.temperature)


def has_a_generator(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(self.inner(x + torch.randn(x.shape, generator=self.generator)))


def drops_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.5 else x + torch.tanh(self.inner(x))


def draws_from_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = numpy.random.rand() + self.numbers.random() + self.dice.random()
    return x + scale * torch.tanh(self.inner(x))


def drops(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.drop(torch.tanh(self.inner(torch.relu(x))))


def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(self.inner(x if self.state is None else x + self.state))
    self.state = y.detach()
    return x + y


def adds_an_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "first"):
        self.first = x.detach().mean()
        return x + torch.tanh(self.inner(x)) * 2
    return x + torch.tanh(self.inner(x - self.first))


def appends(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.mean().item())
    return x + torch.tanh(self.inner(x)) / len(self.history)


def reads_an_iterator(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "numbers_left"):
        self.numbers_left = iter(range(1, 1000))
    return x + torch.tanh(self.inner(x)) / next(self.numbers_left)


CALLS = [0]


def counts_elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x + torch.tanh(self.inner(x)) * (1 + CALLS[0] % 2)


REPEATABLE = [
    counts, anneals, has_a_generator, drops_layers, draws_from_numpy, drops, remembers,
    adds_an_attribute,
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, body: Body, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(body) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            if self.in_place:
                x += block(x)
            else:
                x = block(x)
        return self.head(x)


def train(
    body: Body,
    activations: str | None = None,
    *,
    in_place: bool = False,
    evaluates: bool = False,
    device: str = "8MiB",
    prepare: Callable[[Net], Any] = lambda net: None,
) -> tuple[list[torch.Tensor], Net]:
    """Losses and gradients; without activations: plain PyTorch's."""
    torch.manual_seed(0)
    random.seed(3)
    numpy.random.seed(3)
    CALLS[0] = 0
    net: Any = Net(body, in_place)
    prepare(net)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    if activations is not None:
        memory = {"device": device, "host": "16MiB"}
        net, optimizer = strata.wrap(net, optimizer, memory=memory, activations=activations)
    found = []
    for _ in range(4):
        net.train()
        loss = (net(torch.randn(8, WIDTH)) - 1).square().mean()
        if evaluates:
            net.eval()
        loss.backward()
        found += [
            loss.detach(),
            *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in net.parameters()),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found, net


def assert_as_plain(found: list[torch.Tensor], body: Body, **how: Any) -> None:
    expected, _ = train(body, **how)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def again(net: nn.Module) -> list[bool]:
    """Of the blocks: whether they are computed again."""
    units = [unit for unit in wrapped(net).units if unit.name.startswith("blocks")]
    return [unit.activation in RECOMPUTES for unit in units]


@pytest.mark.parametrize("body", REPEATABLE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "eval-before-backward"])
def test_a_second_run_finds_what_the_first_one_found(
    core: ModuleType, body: Body, evaluates: bool
) -> None:
    found, net = train(body, "recompute", evaluates=evaluates)
    assert_as_plain(found, body, evaluates=evaluates)
    assert all(unit.may_recompute for unit in wrapped(net).units)
    assert all(again(net)) or body is drops_layers
    assert net.blocks[0].calls == (4 if body is counts else 0)


def test_what_a_second_run_would_do_twice_is_kept(
    core: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "strata"):
        found, net = train(appends, "recompute")
    assert_as_plain(found, appends)
    assert not any(again(net))
    (told,) = [r.message for r in caplog.records if "not computed again" in r.message]
    assert "blocks.0, blocks.1, blocks.2" in told
    assert "'history'" in told


def test_an_iterator_that_is_made_in_the_trial_is_kept(core: ModuleType) -> None:
    _, net = train(reads_an_iterator, "recompute")
    assert not any(again(net))


def test_an_iterator_is_not_touched_by_a_trial(core: ModuleType) -> None:
    def give(net: Net) -> None:
        for block in net.blocks:
            block.numbers_left = iter(range(1, 1000))

    found, net = train(reads_an_iterator, "recompute", prepare=give)
    assert_as_plain(found, reads_an_iterator, prepare=give)
    assert not any(again(net))


@pytest.mark.parametrize("activations", ["auto", "keep", "swap", "recompute"])
def test_inputs_that_are_changed_after_the_forward(core: ModuleType, activations: str) -> None:
    found, net = train(drops, activations, in_place=True)
    assert_as_plain(found, drops, in_place=True)
    assert all(again(net)) == (activations == "recompute")


class Seen:
    """Counts calls of hooks."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("activations", ["auto", "keep", "swap", "recompute"])
def test_hooks_of_the_user_see_no_trial(core: ModuleType, activations: str) -> None:
    """Where a unit is computed again they run as under torch's checkpoint: twice."""
    hooks = [Seen(), Seen(), Seen()]

    def register(net: Net) -> None:
        net.blocks[1].inner.register_forward_pre_hook(hooks[0])
        net.blocks[1].inner.register_forward_hook(hooks[1])

    handle = nn.modules.module.register_module_forward_pre_hook(hooks[2])
    try:
        train(counts, prepare=register)
        once, everywhere = hooks[0].calls, hooks[2].calls
        for hook in hooks:
            hook.calls = 0
        train(counts, activations, prepare=register)
    finally:
        handle.remove()
    times = 2 if activations == "recompute" else 1
    assert [hook.calls for hook in hooks[:2]] == [times * once] * 2
    second_runs = (times - 1) * 3 * 4  # of the inner layer of three blocks, in four steps
    assert hooks[2].calls == everywhere + second_runs


@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm", "prune"])
def test_weights_that_hooks_of_torch_make(core: ModuleType, name: str) -> None:
    def change(net: Net) -> None:
        for block in net.blocks:
            if name == "prune":
                prune.l1_unstructured(block.inner, "weight", 0.5)
            else:
                getattr(nn.utils, name)(block.inner)

    found, net = train(drops, "recompute", prepare=change)
    assert_as_plain(found, drops, prepare=change)
    assert all(again(net))


def test_nothing_runs_twice_where_all_fits(core: ModuleType) -> None:
    train(counts_elsewhere)
    expected = CALLS[0]
    found, _ = train(counts_elsewhere, "auto")
    assert CALLS[0] == expected
    assert_as_plain(found, counts_elsewhere)


def test_what_runs_again_for_memory_is_named_once(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Recording, "_fits", lambda *_: False)
    with caplog.at_level(logging.INFO, "strata"):
        found, _ = train(counts, "auto")
    assert_as_plain(found, counts)
    (told,) = [r.message for r in caplog.records if "computed again in the backward" in r.message]
    assert "blocks.0, blocks.1, blocks.2" in told


def test_a_planned_unit_that_may_not_run_again_is_planned_anew(core: ModuleType) -> None:
    net: Any = Net(appends, in_place=False)
    net, optimizer = strata.wrap(
        net, torch.optim.SGD(net.parameters()), memory={"device": "8MiB", "host": "16MiB"}
    )

    def step() -> None:
        net(torch.randn(8, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    planning = wrapped(net).planning
    assert planning is not None
    before = planning.current
    assert before is not None
    number = before.number
    for unit in wrapped(net).units:
        unit.activation = "recompute"
    step()
    assert before.number > number
    assert [len(block.history) for block in net.blocks] == [5, 5, 5]
    assert before.trace is not None
    assert not any(u.may_recompute for u in before.trace.units if u.name.startswith("blocks"))
    step()
    assert not any(again(net))
