"""Saved tensors that leave the device between forward and backward, and come back."""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import MODELS, adamw, assert_same, build, tight, train
from stacks import Blocks, steps
from strata._activations import swapping
from swapped_models import Counts, is_idle, make_swapping, recipes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


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


@pytest.mark.parametrize("slow", [False, True])
def test_device_memory_is_freed_behind_the_forward(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    storages: list[StorageWeakRef] = []
    alive: list[int] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(not s.expired() for s in storages))
        hidden = self.inner(x).exp()
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        return self.outer(hidden)

    model, _, state = make_swapping(recipes(run, 6))
    Counts(state, monkeypatch, slow)
    loss = model(torch.randn(3, 48)).sum()
    assert max(alive) <= swapping.USES_LEAVING - 1
    assert max(alive) > 0 or not slow
    assert state.hooks.swapping.drain() > 0
    assert all(s.expired() for s in storages)
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


def test_without_room_tensors_stay(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(200, 48)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    kept, kept_optimizer = tight(build(Blocks))
    model, optimizer, state = make_swapping(build(Blocks), room=128 << 10)
    counts = Counts(state, monkeypatch)
    assert run(model, optimizer) == run(kept, kept_optimizer)
    assert_same(model, kept)
    assert state.hooks.swapping.kept_for_room > 0
    assert counts.saves  # some did find room
    assert is_idle(state)


def test_odd_tensors_stay(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, conjugated, sparse and expanded ones: what has nothing to give, or is no memory."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.table
        z = torch.complex(self.outer(x), self.inner(x))
        spread = self.outer.bias.sum().expand(3, 48)
        sparse = torch.eye(3).to_sparse()
        return torch.sparse.mm(sparse, y) + (z.conj() * z).real + spread * spread

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
