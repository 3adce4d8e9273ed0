"""Recorded steps take few bytes of the device, and try with less where memory runs out."""

import logging
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import adamw
from strata._config.sizes import parse_size
from strata._planning.recording import Recording
from strata._runtime.wrapped import wrapped
from torch import nn

ROWS, WIDTH = 8, 64


class Block(nn.Module):
    """Raises where more rows than it takes come at once; `when`: in forward, or computed again."""

    def __init__(self, rows: int, again: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.rows = rows
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and backward == self.again and x.shape[0] > self.rows:
            raise torch.OutOfMemoryError("no room")
        return x + self.inner(x).tanh()


def stack(rows: int = ROWS, again: bool = False, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(rows, again) for _ in range(count)])


def wrap(model: nn.Module, device: str = "8MiB", **more: Any) -> tuple[nn.Module, Any]:
    memory = {"device": device, "host": "32MiB"}
    return strata.wrap(
        model, adamw(model), memory=memory, page_size="64KiB", activations="auto", **more
    )


def run(model: nn.Module, optimizer: Any, count: int, width: int = WIDTH, rows: int = ROWS) -> None:
    torch.manual_seed(1)
    for _ in range(count):
        model(torch.randn(rows, 64, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_forward_that_runs_out_of_memory_runs_on_slices(core: ModuleType, rows: int) -> None:
    model, optimizer = wrap(stack(rows))
    run(model, optimizer, 5)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.trace is not None
    assert planning.plan is not None
    assert {unit.slices_traced for unit in planning.trace.units} == {ROWS // rows}
    assert {unit.slices for unit in planning.plan.units} == {ROWS // rows}


def test_without_slices_the_error_says_what_would_help(core: ModuleType) -> None:
    model, _ = wrap(stack(0))
    with pytest.raises(torch.OutOfMemoryError) as error:
        model(torch.randn(ROWS, 64, WIDTH))
    assert any("A smaller batch" in note for note in error.value.__notes__)


def test_the_step_after_a_backward_that_ran_out_takes_less(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "_fits", lambda *_: False)
    model, optimizer = wrap(stack(2, again=True))
    for _ in range(2):  # whole, and on 2 slices
        with pytest.raises(torch.OutOfMemoryError) as error:
            run(model, optimizer, 1)
        assert any("will try to take less" in note for note in error.value.__notes__)
        optimizer.zero_grad()
    run(model, optimizer, 4)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.plan is not None
    assert {unit.slices for unit in planning.plan.units} == {4}


class Full(torch.autograd.Function):
    """An operation whose backward has room only where all units are computed again."""

    units: tuple[Any, ...] = ()
    errors = 0  # of the allocator

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.fits = all(unit.activation != "keep" for unit in Full.units)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not ctx.fits:
            Full.errors += 1
            raise torch.OutOfMemoryError("no room")
        return grad


def test_a_backward_that_ran_out_is_made_again_without_what_was_kept(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are computed again first, and on slices later."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(Full.apply(x))

    monkeypatch.setattr(Recording, "_allocator_errors", lambda _: Full.errors)
    model, optimizer = wrap(nn.Sequential(*[Block(WIDTH, WIDTH) for _ in range(4)]))
    Full.units = tuple(wrapped(model).units)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, optimizer, 1)
    optimizer.zero_grad()
    run(model, optimizer, 1)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.trace is not None
    assert {(u.traced, u.slices_traced) for u in planning.trace.units} == {("recompute_host", 1)}


def recorded_peak(model: nn.Module, pages: int) -> int:
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.trace is not None
    return pages + max(use.peak_bytes for use in planning.trace.uses)


def test_inputs_that_fill_the_device_leave() -> None:
    """24 blocks with inputs of 128 KiB, on a device of 2.5 MiB."""
    model, optimizer = wrap(stack(count=24), "2560KiB")
    state = wrapped(model)
    assert state.planning is not None
    run(model, optimizer, 1)
    peak = recorded_peak(model, state.planning.allocator.page_bytes)
    # All of them: an input that stayed would make slices of backward passes that need none.
    assert {unit.traced for unit in state.planning.trace.units} == {"recompute_host"}
    assert peak <= 2560 << 10
    run(model, optimizer, 4)
    assert state.planning.plan is not None
    assert state.planning.plan.feasible


class Wide(nn.Module):
    """Saves many times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("device", ["8MiB", "12MiB", "24MiB"])
def test_a_backward_that_needs_more_than_is_left_is_recorded_on_slices(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that save 8 MiB and need about 14 in a backward. No more slices than that takes, and
    all steps run on as many."""
    monkeypatch.setattr(Recording, "_limited", True)  # as on a GPU
    torch.manual_seed(0)
    model, optimizer = wrap(nn.Sequential(*[Wide() for _ in range(4)]), device)
    state = wrapped(model)
    assert state.planning is not None
    run(model, optimizer, 1, rows=16)
    assert state.planning.trace is not None
    slices = {unit.slices_traced for unit in state.planning.trace.units}
    assert slices == {{"8MiB": 4, "12MiB": 2, "24MiB": 1}[device]}
    copies = 2 * 16 * 64 * WIDTH * 4  # of the batch, and of a unit's input, in the first step
    peak = recorded_peak(model, state.planning.allocator.page_bytes)
    assert peak <= parse_size(device) + copies
    run(model, optimizer, 3, rows=16)
    assert state.planning.plan is not None
    assert {unit.slices for unit in state.planning.plan.units} == slices


class Once(nn.Module):
    """May not be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scales = iter([1.0] * 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh() * next(self.scales)


@pytest.mark.parametrize("device", ["2500KiB", "1500KiB"])
def test_no_unit_is_cut_for_what_others_keep(
    core: ModuleType, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Six units keep 3 MiB: the head has no room, on as many slices as there are rows either."""
    torch.manual_seed(0)
    model, optimizer = wrap(nn.Sequential(*[Once() for _ in range(6)], nn.Linear(WIDTH, 1)), device)
    state = wrapped(model)
    refused = ""
    with caplog.at_level(logging.INFO, "strata"):
        try:
            for _ in range(4):
                model(torch.randn(128, 8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except strata.StrataError as error:
            refused = str(error)
    assert not [r.message for r in caplog.records if "recorded on" in r.message]
    assert {unit.slices for unit in state.units} == {1}
    assert ("device" in refused) == (device == "1500KiB")


class Constant(nn.Module):
    """Saves 4 MiB, however many rows it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * (self.scale * torch.ones(1 << 20)).square().mean()


def test_slices_that_free_nothing_are_not_kept(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrap(nn.Sequential(*[Constant() for _ in range(3)]), "4MiB")
    state = wrapped(model)
    assert state.planning is not None
    state.planning.recording.take_less()
    monkeypatch.setattr(type(state.planning), "_plan_for", lambda *_: None)
    run(model, optimizer, 1)
    assert state.planning.trace is not None
    assert {unit.slices_traced for unit in state.planning.trace.units} == {1}
    assert state.planning.recording.slices_min == 1


@pytest.mark.parametrize("probe", [False, True])
def test_a_backward_that_reads_no_page_is_one(core: ModuleType, probe: bool) -> None:
    """A layer whose input needs no gradient, alone or behind a frozen trunk."""
    head = nn.Linear(WIDTH, WIDTH)
    trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model, optimizer = wrap(nn.Sequential(trunk, head) if probe else head)
    run(model, optimizer, 4)
    planning = wrapped(model).planning
    assert planning is not None
    assert planning.plan is not None
