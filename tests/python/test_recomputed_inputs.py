"""Units that are recomputed, whose inputs leave the device between forward and backward."""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import MODELS, assert_same, build, tight, train
from stacks import Blocks, steps
from strata._activations import swapping
from swapped_models import Counts, is_idle, make_swapping, recipes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "BYTES_MIN", 64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_the_same_bits_as_plain_recomputation(
    core: ModuleType, name: str, tier: str, tmp_path: Path
) -> None:
    budgets: dict[str, Any] = {
        "memory": {"device": "64MiB", "host": "64MiB"}, "page_size": "64KiB",
    }  # fmt: skip
    plain = build(MODELS[name])
    kept, kept_optimizer, _ = make_swapping(copy.deepcopy(plain), "recompute", **budgets)
    if tier == "ssd":
        budgets["memory"] = {**budgets["memory"], "ssd": "64MiB"}
        budgets["ssd_path"] = tmp_path
    model, optimizer, state = make_swapping(plain, f"recompute_{tier}", **budgets)
    assert train(model, optimizer) == train(kept, kept_optimizer)
    assert_same(model, kept)
    assert state.hooks.swapping.kept_for_room == 0
    assert is_idle(state)


def test_inputs_are_freed_behind_the_forward(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: list[StorageWeakRef] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).exp().sin()) + x

    def note(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        if torch._C._current_graph_task_id() == -1:
            inputs.append(StorageWeakRef(args[0].untyped_storage()))

    plain = recipes(run, 6)
    for block in plain.children():
        block.register_forward_pre_hook(note)
    model, optimizer, state = make_swapping(plain, "recompute_host")
    given = torch.randn(6, 48)
    model(given).sum().backward()  # the first one copies them, see forwards.py Note [Proof]
    optimizer.zero_grad()
    inputs.clear()
    counts = Counts(state, monkeypatch)
    loss = model(given).sum()
    state.hooks.swapping.drain()
    assert sum(not s.expired() for s in inputs) == 1, "the batch itself"
    assert len(counts.saves) == 6
    assert {size for _, size in counts.saves} == {given.nbytes}
    loss.backward()
    assert len(counts.fetches) == 5, "the batch is there still"
    assert is_idle(state)


@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_of_one_input_leave_by_themselves(core: ModuleType, slices: int) -> None:
    results = []
    for mode in ("recompute", "recompute_host"):
        model, optimizer, state = make_swapping(build(Blocks), mode)
        state.may_split = True
        for unit in state.units:
            unit.slices = slices
        results.append((steps(model, optimizer), model))
        assert is_idle(state)
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


def gradients_of_input(mode: str, **more: Any) -> list[torch.Tensor]:
    """By two backwards through one graph, and by a gradient's gradient."""
    model, _, state = make_swapping(build(Blocks), mode, **more)
    torch.manual_seed(3)
    x = torch.randn(4, 48, requires_grad=True)
    found = []
    loss = model(x * 2).square().sum()
    for retain in (True, False):
        found.append(torch.autograd.grad(loss, x, retain_graph=retain)[0])
    (first,) = torch.autograd.grad(model(x * 2).square().sum(), x, create_graph=True)
    found.append(torch.autograd.grad(first.square().sum(), x)[0])
    del loss, first
    assert is_idle(state)
    return found


def test_kept_graphs_and_second_derivatives(core: ModuleType) -> None:
    expected = gradients_of_input("recompute")
    for mine, theirs in zip(gradients_of_input("recompute_host"), expected, strict=True):
        assert torch.equal(mine, theirs)


class Shared(nn.Module):
    """Blocks that share an argument and are called twice, some in a checkpoint of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.model.blocks:
            x = block(x)
            with torch.no_grad():
                block(x)
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_units_called_twice_and_in_checkpoints_of_the_user(core: ModuleType) -> None:
    results = []
    for mode in ("recompute", "recompute_host"):
        model, optimizer, state = make_swapping(build(Shared), mode)
        results.append((steps(model, optimizer), model))
        assert is_idle(state)
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


def test_an_input_that_is_changed_in_place_is_noticed(core: ModuleType) -> None:
    held: list[torch.Tensor] = []

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        held.append(x)
        return self.outer(self.inner(x))

    model, optimizer, state = make_swapping(recipes(run), "recompute_host")
    model(torch.randn(4, 48)).sum().backward()
    optimizer.zero_grad()
    held.clear()
    loss = model(torch.randn(4, 48)).sum()
    with torch.no_grad():
        held[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    held.clear()
    del loss
    assert is_idle(state)


def test_without_room_inputs_stay(core: ModuleType) -> None:
    expected, optimizer = tight(build(Blocks))
    losses = steps(expected, optimizer)
    model, optimizer, state = make_swapping(build(Blocks), "recompute_host", room=0)
    assert steps(model, optimizer) == losses
    assert state.hooks.swapping.kept_for_room > 0
