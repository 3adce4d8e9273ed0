"""Updates that still wait when later steps begin: each computes with the hyperparameters and the
gradient of its own step."""

import threading
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build, tight
from strata._optim.foreign import Foreign
from torch import nn
from torch.optim import SGD

MODES: dict[str, Any] = {
    "on_step": "on_step",
    "in_backward": "in_backward",
    "LockFree(0)": strata.LockFree(max_staleness=0),
}


class Gated(SGD):
    """SGD whose updates wait at a gate, on worker threads; a class of its own has no kernel."""

    gate = threading.Event()
    gate.set()

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(300)
        return super().step(closure)


class TwoTasks(nn.Module):
    """More pages for each task than updates that can be under way."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleList(nn.Linear(256, 640) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        out: torch.Tensor = self.tasks[task](x)
        return out


def alternate(model: nn.Module, optimizer: torch.optim.Optimizer, wait: bool) -> None:
    """Every step has another task and other hyperparameters. `wait`: the first one's updates wait
    until the second one's are released."""
    torch.manual_seed(4)
    for step in range(4):
        task = step % 2
        optimizer.param_groups[0]["lr"] = 2.0 ** -(3 + step)
        optimizer.param_groups[0]["weight_decay"] = 2.0 ** -(2 + step % 3)
        loss = model(torch.randn(4, 256), task).square().sum().mul(2.0**-6)
        if wait and step == 0:
            Gated.gate.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if task == 1:
            Gated.gate.set()


@pytest.mark.parametrize("mode", MODES)
def test_alternating_tasks(mode: str) -> None:
    plain = build(TwoTasks)
    alternate(plain, Gated(plain.parameters(), lr=1.0), wait=False)
    inner = build(TwoTasks)
    optimizer = Gated(inner.parameters(), lr=1.0)
    memory = {"device": "8MiB", "host": "64MiB"}  # no task waits for the other's place
    options: dict[str, Any] = {"page_size": "64KiB", "activations": None, "workers": 1}
    model, optimizer = strata.wrap(inner, optimizer, memory=memory, update=MODES[mode], **options)
    alternate(model, optimizer, wait=mode != "on_step")  # whose step() waits for the last one's
    assert_same(model, plain)


class Offsets(nn.Module):
    """Its gradients need no parameter, so that no backward waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.ModuleList(Offset() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for offset in self.offsets:
            x = offset(x)
        return x


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_two_steps_make_two_updates(core: ModuleType, mode: str) -> None:
    """Also where the second one lands before the first one's update began."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        losses = [(model(torch.ones(2000)) * factor).sum() for factor in (1.0, 0.5, -4.0)]
        for step, loss in enumerate(losses):
            optimizer.param_groups[0]["lr"] = 2.0**-step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, inner = build(Offsets), build(Offsets)
    steps(plain, Gated(plain.parameters(), lr=1.0, momentum=0.5))
    optimizer = Gated(inner.parameters(), lr=1.0, momentum=0.5)
    model, optimizer = tight(inner, optimizer, update=MODES[mode], workers=1)
    steps(model, optimizer)
    assert_same(model, plain)


def test_options_that_come_back_are_kept() -> None:
    """Of a class without a kernel: those used last stay, not those that were new last."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Gated([parameter], lr=0.0)
    foreign, group = Foreign(optimizer), optimizer.param_groups[0]
    first = foreign.remember(group)
    for lr in range(1, 1024):
        foreign.remember({**group, "lr": float(lr)})
    assert foreign.remember(group) == first
    foreign.remember({**group, "lr": -1.0})
    assert first in foreign._known
