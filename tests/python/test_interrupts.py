"""KeyboardInterrupt at any point of a step: what follows equals plain PyTorch, bit for bit.

The suite tries a sample of the points. STRATA_INTERRUPTS=all tries every one, some thousands in
each setting, and STRATA_INTERRUPTS=100 every hundredth.
"""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import strata
import torch
from interrupts import Interrupt
from small_models import build, tight
from strata._runtime.lander import Lander
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SAMPLE = 16  # points of each setting
WIDTH = 128  # a layer takes more than a page
ROOM = 1 << 20  # for activations

SETTINGS: list[tuple[str, str, Any]] = [
    ("keep", "planned", "on_step"),
    ("swap_host", "None", "on_step"),
    ("recompute", "None", "on_step"),
    ("checkpoint", "None", "on_step"),
    ("keep", "changed", "on_step"),
    ("keep", "None", "in_backward"),
    ("keep", "aside", "in_backward"),
    ("recompute", "None", "in_backward"),
    ("swap_host", "None", strata.LockFree(max_staleness=0)),
]


class Block(nn.Module):
    """Two layers of which one is read on its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Tiny(nn.Module):
    """Units of several kinds: a leaf, blocks, and a parameter that is used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpoints = False  # the user's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.last(x).square().mean() + F.linear(x, self.last.weight.t()).tanh().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)  # the same bits as torch's


class Race:
    """A wrapped model and the plain one that takes the same steps."""

    def __init__(self, activation: str, activations: str, update: Any) -> None:
        self.plain = build(Tiny)
        self.inner = sgd(self.plain)
        options: dict[str, Any] = {"update": update}
        if activations == "planned":
            budgets = {"device": "1MiB", "host": "64MiB"}
            options |= {"activations": activation, "memory": budgets, "page_size": "64KiB"}
        model = build(Tiny)
        self.model, self.optimizer = tight(model, sgd(model), **options)
        self.state = wrapped(self.model)
        if activations == "aside":  # gradients land on a thread of their own, as on a GPU
            self.state.landings = Lander(torch.device("cpu"), 1 << 20)
        self.changes = activations == "changed"  # between a backward and a step
        self.batches = 0
        self.last = Interrupt(None)
        self.model.checkpoints = activation == "checkpoint"
        if activations == "planned":
            for _ in range(4):
                self.step()
        else:
            self.state.session.adopt(activation_host_bytes=ROOM)
            for unit in self.state.units:
                swaps = activation == "swap_host"
                recomputes = activation == "recompute" and unit.may_recompute
                unit.activation = activation if swaps or recomputes else "keep"  # type: ignore[assignment]
        self.step()

    def batch(self) -> torch.Tensor:
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.batches))

    def whole(self) -> None:
        """All that is interrupted: a step and what people do around it."""
        x = self.batch()
        self.model(x).backward()
        self.change(self.model, x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model(x)
        self.model.last.weight.sum()

    def change(self, model: Any, x: torch.Tensor) -> None:
        """What people do to gradients."""
        if not self.changes:
            return
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        model(x * norm.isfinite()).backward()
        first, last = model.first.weight, model.last.weight
        first.grad.mul_(0.3).clamp_(-1e-2, 1e-2)
        row = last.grad[3]
        row.zero_()
        model.blocks[0].inner.bias.grad = None
        model.blocks[0].inner.bias.grad = torch.ones(WIDTH)
        model.blocks[1].inner.weight.grad.zero_()
        kept = first.grad
        first.grad = None
        first.grad = kept * 0.5

    def step_plain(self, moved: Callable[[int], bool] = lambda i: True) -> None:
        """`moved`: which parameters take part."""
        self.plain(self.batch()).backward()
        self.change(self.plain, self.batch())
        for i, parameter in enumerate(self.plain.parameters()):
            if not moved(i):
                parameter.grad = None
        self.inner.step()
        self.inner.zero_grad()
        self.batches += 1

    def step(self) -> None:
        """One that nobody interrupts, on both sides."""
        loss = self.model(self.batch())
        loss.backward()
        self.change(self.model, self.batch())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_plain()

    def counts(self) -> list[int]:
        return [self.state.session.param_step(i) for i in range(len(self.state.params))]

    def check(self) -> None:
        for (name, mine), other in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            with torch.no_grad():
                assert torch.equal(mine.clone(), other), f"{name} {(mine - other).abs().max()}"

    def recover(self) -> None:
        """What the user does; or ends the step where some of it has been taken."""
        self.state.landings.wait()
        if self.state.session.in_half_step():
            for refused in (self.optimizer.zero_grad, lambda: strata.save(self.model, "nowhere")):
                with pytest.raises(RuntimeError, match="in_backward"):
                    refused()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def interrupt(self, at: int) -> None:
        """Interrupts at a point, and holds what follows against the plain model."""
        before = self.counts()
        interrupt = self.last = Interrupt(at)
        interrupt.run(self.whole)
        self.recover()
        after = self.counts()
        moved = [b != a for b, a in zip(before, after, strict=True)]
        assert self.state.config["update"] == "in_backward" or len(set(moved)) == 1
        if any(moved):
            self.step_plain(lambda i: moved[i])
        self.check()
        for _ in range(2):
            self.step()
        self.check()
        assert not any(self.state.session.entered(u.index) for u in self.state.units)

    def points(self) -> int:
        """How many there are; a step is taken meanwhile."""
        interrupt = Interrupt(None)
        interrupt.run(self.whole)
        self.step_plain()
        return interrupt.count


def chosen(count: int) -> list[int]:
    wish = os.environ.get("STRATA_INTERRUPTS", "")
    if wish:
        return list(range(0, count, 1 if wish == "all" else int(wish)))
    return sorted(random.Random(0).sample(range(count), min(count, SAMPLE)))


@pytest.fixture(params=SETTINGS, ids=lambda s: "-".join(map(str, s)))
def race(request: pytest.FixtureRequest) -> Iterator[Race]:
    made = Race(*request.param)
    yield made
    made.state.landings.close()


def test_a_step_that_is_interrupted_anywhere(race: Race) -> None:
    race.points()
    count = race.points()
    for at in chosen(count):
        try:
            race.interrupt(at)
        except BaseException as error:
            error.add_note(f"interrupted at point {at} of {count}: {race.last.where}")
            raise
