"""Saved tensors that leave the device between forward and backward, and come back."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import (
    MODELS,
    adamw,
    assert_same,
    build,
    tight,
    train,
)
from stacks import Blocks, steps
from strata import swapping
from strata.wrapped import Wrapped, wrapped
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOM = 8 << 20


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


class Counts:
    """What a session is asked for, while it does it."""

    def __init__(self, state: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saves: list[tuple[int, int]] = []  # address, bytes
        self.fetches: list[int] = []
        self.stages: list[int] = []
        self.waits = 0
        self.live: set[int] = set()
        self._session = session = state.session
        watched = _Watched(session, self)
        monkeypatch.setattr(state, "session", watched)
        monkeypatch.setattr(state.hooks.swapping, "_session", watched)


class _Watched:
    def __init__(self, session: Any, counts: Counts) -> None:
        self._session = session
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def save_activation(self, address: int, size: int, to_ssd: bool, unit: int) -> int:
        save = self._session.save_activation(address, size, to_ssd, unit)
        if save >= 0:
            self._counts.saves.append((address, size))
            self._counts.live.add(save)
        return save

    def fetch_activation(self, save: int, address: int) -> None:
        self._counts.fetches.append(save)
        self._session.fetch_activation(save, address)

    def activation_fetched(self, save: int, wait: bool) -> bool:
        self._counts.waits += wait
        return self._session.activation_fetched(save, wait)

    def stage_activation(self, save: int) -> None:
        self._counts.stages.append(save)
        self._session.stage_activation(save)

    def drop_activation(self, save: int) -> None:
        self._counts.live.remove(save)
        self._session.drop_activation(save)


def set_mode(model: nn.Module, activation: str, room: int = ROOM) -> Wrapped:
    state = wrapped(model)
    to_ssd = activation == "swap_ssd"
    state.session.reserve_activations(0 if to_ssd else room, room if to_ssd else 0)
    for unit in state.units:
        unit.activation = activation  # type: ignore[assignment]
    return state


def make_swapping(
    model: nn.Module, activation: str = "swap_host", room: int = ROOM, **more: Any
) -> tuple[nn.Module, Any, Wrapped]:
    model, optimizer = tight(model, **more)
    return model, optimizer, set_mode(model, activation, room)


def is_idle(state: Wrapped) -> bool:
    """Whether nothing is saved any more, once what was under way has ended.

    What an error left behind is dropped before, as the next forward does it.
    """
    state.hooks.reset()
    gc.collect()
    return state.hooks.swapping.drain() == 0


class Recipe(nn.Module):
    """One unit whose forward is the test's."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.inner = nn.Linear(48, 48)
        self.outer = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def recipes(run: Callable[[Any, torch.Tensor], torch.Tensor], count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Recipe(run) for _ in range(count)])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_bitwise_equal(core: ModuleType, name: str, tier: str, tmp_path: Path) -> None:
    budgets = {"memory": {"device": "64MiB", "host": "64MiB"}, "page_size": "64KiB"}
    plain = build(MODELS[name])
    kept, kept_optimizer = tight(copy.deepcopy(plain), **budgets)
    if tier == "ssd":
        budgets["memory"] = {**budgets["memory"], "ssd": "64MiB"}  # type: ignore[dict-item]
        budgets["ssd_path"] = tmp_path  # type: ignore[assignment]
    model, optimizer, state = make_swapping(copy.deepcopy(plain), f"swap_{tier}", **budgets)
    expected = train(kept, kept_optimizer)
    assert train(model, optimizer) == expected
    assert_same(model, kept)
    assert expected == pytest.approx(train(plain, adamw(plain)), rel=1e-5)
    assert state.hooks.swapping.kept_for_room == 0
    assert is_idle(state)


def test_bitwise_equal_with_a_tight_device(core: ModuleType) -> None:
    kept, kept_optimizer = tight(build(Blocks))
    model, optimizer, state = make_swapping(build(Blocks))
    assert steps(model, optimizer) == steps(kept, kept_optimizer)
    assert_same(model, kept)
    assert is_idle(state)


def test_device_memory_is_freed_behind_the_forward(core: ModuleType) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(t() is not None for t in tensors))
        hidden = self.inner(x).exp()
        tensors.append(weakref.ref(hidden))
        return self.outer(hidden)

    model, _, state = make_swapping(recipes(run, 6))
    loss = model(torch.randn(3, 48)).sum()
    assert max(alive) <= swapping.USES_LEAVING
    assert state.hooks.swapping.drain() > 0
    assert not any(t() is not None for t in tensors)
    loss.backward()
    assert is_idle(state)


def test_kept_tensors_stay(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = make_swapping(build(Blocks), "keep")
    counts = Counts(state, monkeypatch)
    steps(model, optimizer)
    assert not counts.saves


def test_views_of_a_storage_are_saved_once(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([self.inner(x), self.outer(x)], -1)
        a, b = wide.chunk(2, -1)
        return (a * b).exp() + (a.t() @ b).sum() + (wide * wide).sum(-1, keepdim=True)

    model = recipes(run)
    model[1].run = lambda self, x: self.outer(self.inner(x))
    plain = copy.deepcopy(model)
    model, _, state = make_swapping(model)
    state.units[1].activation = "keep"
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    model(x).sum().backward()
    found, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(found, x.grad)
    # Besides `x`, a leaf that the test keeps: `wide` with all its views, and what exp() gave.
    assert [size for _, size in counts.saves] == [3 * 96 * 4, 3 * 48 * 4]
    assert len(counts.fetches) <= 2


def test_a_small_view_moves_without_the_rest(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.inner(x)] * 100)
        part = rows[150:170, 1::2]
        return self.outer(x) + (part * part).sum()

    model = recipes(run)
    model[1].run = lambda self, x: self.outer(self.inner(x))
    plain = copy.deepcopy(model)
    model, _, state = make_swapping(model)
    state.units[1].activation = "keep"
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    loss = model(x).sum()
    state.hooks.swapping.drain()
    loss.backward()
    found, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(found, x.grad)
    span = 19 * 48 * 4 + 47 * 4
    assert all(span <= size <= span + swapping.ALIGNMENT for _, size in counts.saves)
    assert len(counts.saves) == len(counts.fetches) == 1


def test_what_others_hold_is_not_fetched(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(self.inner(x).exp())
        return self.outer(held[-1])

    model, _, state = make_swapping(recipes(run))
    counts = Counts(state, monkeypatch)
    loss = model(torch.randn(3, 48, requires_grad=True)).sum()
    state.hooks.swapping.drain()
    loss.backward()
    assert len(counts.saves) == 3  # the outputs of exp(), and of the first module
    assert len(counts.fetches) == 1
    held.clear()
    del loss
    assert is_idle(state)


def test_tensors_come_back_ahead_of_need(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, place: int) -> torch.Tensor:
            ctx.place = place
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append((len(counts.fetches), len(counts.stages)))
            return grad, None

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(Watch.apply(x, 0)).sigmoid()).exp()

    memory = {"device": "1MiB", "host": "64MiB", "ssd": "64MiB"}
    model, _, state = make_swapping(
        recipes(run, 5), "swap_ssd", memory=memory, page_size="64KiB", ssd_path=tmp_path
    )
    counts = Counts(state, monkeypatch)
    loss = model(torch.randn(3, 48)).sum()
    state.hooks.swapping.drain()
    per_unit = len(counts.saves) // 5
    assert per_unit >= 2
    loss.backward()
    # At the end of each module's backward, the tensors of one more have been fetched, and those of
    # yet another one staged.
    fetched = [n for n, _ in seen]
    assert fetched == sorted(fetched)
    assert all(n >= per_unit * min(5, i + 2) - 1 for i, n in enumerate(fetched))
    assert fetched[0] <= 2 * per_unit + 1
    staged = [n for _, n in seen]
    assert staged[0] >= per_unit - 1
    assert is_idle(state)


def test_a_change_in_place_is_noticed(core: ModuleType) -> None:
    def during(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = y * y
        y.add_(1)
        return z

    model, _, state = make_swapping(recipes(during))
    with pytest.raises(RuntimeError, match="modified"):
        model(torch.randn(2, 48)).sum().backward()

    held: list[torch.Tensor] = []

    def later(self: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(self.inner(x))
        return held[-1] * held[-1]

    model, _, state = make_swapping(recipes(later))
    loss = model(torch.randn(2, 48)).sum()
    state.hooks.swapping.drain()
    with torch.no_grad():
        held[0][1:].mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    held.clear()
    del loss
    assert is_idle(state)


def test_a_storage_saved_before_and_after_a_change(core: ModuleType) -> None:
    """Only the later value is read in backward: nothing is wrong, and it must be that value."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        (y * y).sum()  # saves it; nobody asks for its gradient
        y.mul_(2)
        return self.outer(y.exp() + y * y)

    model = recipes(run)
    plain = copy.deepcopy(model)
    model, _, state = make_swapping(model)
    x = torch.randn(3, 48, requires_grad=True)
    model(x).sum().backward()
    found, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(found, x.grad)
    assert is_idle(state)


def test_backward_twice(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, state = make_swapping(build(Blocks), accumulation_steps=2)
    plain = build(Blocks)
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().sum(), x)[0]
    loss = model(x).square().sum()
    state.hooks.swapping.drain()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    fetches = len(counts.fetches)
    assert fetches > 0
    assert state.hooks.swapping.drain() > 0
    (second,) = torch.autograd.grad(loss, x)
    assert len(counts.fetches) == 2 * fetches  # between the two nothing was on the device
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    del loss
    assert is_idle(state)
    assert not counts.live


def test_second_derivative(core: ModuleType) -> None:
    def penalty(model: nn.Module, state: Wrapped | None) -> torch.Tensor:
        x = torch.linspace(-1, 1, 48).expand(2, 48).clone().requires_grad_()
        out = model(x).exp().sum()
        if state:
            state.hooks.swapping.drain()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = penalty(build(Blocks), None)
    model, _, state = make_swapping(build(Blocks))
    torch.testing.assert_close(penalty(model, state), expected)
    assert is_idle(state)


def test_a_graph_without_backward_leaves_nothing(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, state = make_swapping(build(MODELS["gpt2"]))
    counts = Counts(state, monkeypatch)
    tokens = torch.randint(0, 64, (2, 12))
    loss = model(input_ids=tokens, labels=tokens).loss
    assert counts.live
    del loss
    assert is_idle(state)
    assert not counts.live
    train(model, optimizer, 1)
    assert not counts.live


@pytest.mark.parametrize("mode", ["keep", "swap_host"])
def test_outputs_saved_by_their_own_node_are_freed(core: ModuleType, mode: str) -> None:
    """exp() saves its result, which refers to exp(): no cycle may come of it."""
    outputs: list[weakref.ref[torch.Tensor]] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).exp()
        outputs.append(weakref.ref(y))
        return self.outer(y)

    model, _, state = make_swapping(recipes(run), mode)
    model(torch.randn(3, 48))
    state.hooks.swapping.drain()
    assert len(outputs) == 2
    assert not any(y() is not None for y in outputs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing(core: ModuleType, where: str) -> None:
    armed = [True]

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "forward":
                raise ValueError("boom")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if armed[0]:
                raise ValueError("boom")
            return grad

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).exp()
        return self.outer(Bomb.apply(y) if self.bomb else y)

    def make() -> nn.Module:
        model = recipes(run, 4)
        for i, part in enumerate(model):
            part.bomb = i == 2
        return model

    model, optimizer, state = make_swapping(make())
    with pytest.raises(ValueError, match="boom"):
        model(torch.randn(3, 48)).sum().backward()
    assert is_idle(state)
    optimizer.zero_grad()
    armed[0] = False
    plain = make()
    assert steps(model, optimizer) == pytest.approx(steps(plain, adamw(plain)), rel=1e-6)
    assert is_idle(state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_a_swapped_unit(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        y = checkpoint(lambda v: self.outer(F.gelu(v)), x, use_reentrant=reentrant)
        return x + y.exp()

    plain = recipes(run)
    model, optimizer, state = make_swapping(copy.deepcopy(plain))
    counts = Counts(state, monkeypatch)
    assert steps(model, optimizer) == pytest.approx(steps(plain, adamw(plain)), rel=1e-6)
    # Each step and unit: its input, the checkpoint's and exp(), and nothing of what that one drops.
    assert len(counts.saves) == 3 * 2 * 3
    assert is_idle(state)


def test_evaluation_between_forward_and_backward(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _, state = make_swapping(build(Blocks))
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    loss = model(x).square().sum()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, 48))
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    del loss
    assert is_idle(state)


def test_two_forwards_before_their_backwards(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _, state = make_swapping(build(Blocks))
    inputs = [torch.randn(3, 48, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(sum(plain(x).square().sum() for x in inputs), inputs)
    found = torch.autograd.grad(sum(model(x).square().sum() for x in inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert is_idle(state)


def test_without_room_tensors_stay(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, kept_optimizer = tight(build(Blocks))
    model, optimizer, state = make_swapping(build(Blocks), room=4096)
    counts = Counts(state, monkeypatch)
    assert steps(model, optimizer) == steps(kept, kept_optimizer)
    assert_same(model, kept)
    assert state.hooks.swapping.kept_for_room > 0
    assert counts.saves  # some did find room
    assert is_idle(state)


def test_two_models(core: ModuleType) -> None:
    plain = [build(Blocks, seed) for seed in (0, 1)]
    both = [make_swapping(copy.deepcopy(m)) for m in plain]
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain[1](plain[0](x)).square().sum(), x)
    (found,) = torch.autograd.grad(both[1][0](both[0][0](x)).square().sum(), x)
    assert torch.equal(found, expected)
    for _, _, state in both:
        assert is_idle(state)


def test_a_unit_called_twice(core: ModuleType) -> None:
    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = x + block(x)
        return x

    def make() -> nn.Module:
        model = build(Blocks)
        model.run = twice
        return model

    kept, kept_optimizer = tight(make())
    model, optimizer, state = make_swapping(make())
    assert steps(model, optimizer) == steps(kept, kept_optimizer)
    assert_same(model, kept)
    assert is_idle(state)


def test_odd_tensors_stay(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, conjugated, sparse and expanded ones: what has nothing to give, or is no memory."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.table
        z = torch.complex(self.outer(x), torch.zeros_like(x))
        spread = self.outer.bias.sum().expand(3, 48)
        sparse = torch.eye(3).to_sparse()
        return torch.sparse.mm(sparse, y) + (z.conj() * 2j).real + spread * spread

    def make() -> nn.Module:
        model = recipes(run)
        for part in model:
            part.register_buffer("table", torch.linspace(0, 1, 48).expand(3, 48).contiguous())
        return model

    plain = make()
    model, _, state = make_swapping(copy.deepcopy(plain))
    counts = Counts(state, monkeypatch)
    x = torch.randn(3, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(found, expected)
    tables = {part.table.data_ptr() for part in model}
    assert not tables & {address for address, _ in counts.saves}
    assert is_idle(state)


def test_unwrap_waits_for_copies(core: ModuleType) -> None:
    model, optimizer, _ = make_swapping(build(Blocks))
    steps(model, optimizer)
    loss = model(torch.randn(3, 48)).sum()
    strata.unwrap(model)
    with pytest.raises(RuntimeError):
        loss.backward()
    steps(model, adamw(model))
