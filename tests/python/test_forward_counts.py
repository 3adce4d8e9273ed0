"""Random small modules with state in Python, hooks and generators: what is called runs as often as
in plain PyTorch wherever everything fits, with the same results in every mode.

STRATA_SEEDS=30 pytest tests/python/test_forward_counts.py     # more of them
STRATA_SEED=7 pytest tests/python/test_forward_counts.py       # replays one
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from habits import UPDATES, WIDTH, Block, Habit, Mode, Run, batch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEEDS = max(8, int(os.environ.get("STRATA_SEEDS", "0")))
ONE = os.environ.get("STRATA_SEED")
KEPT = ("auto", "keep", "swap", None)  # "recompute" asks for a second run


# Blocks -------------------------------------------------------------------------------------------


class Stateful(Block):
    """Counts its calls, and has whatever its kind needs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.inner_calls = 0
        self.temperature = 2.0
        self.scales = itertools.cycle([0.5, 1.0, 1.5])
        self.generator = torch.Generator().manual_seed(3)
        self.log: list[float] = []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.inner_calls += 1
        return super().inner(x)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return KINDS[self.kind](self, x)


def noisy(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.inner(x + 0.2 * torch.randn(x.shape, generator=block.generator))


def noisy_by_numpy(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + block.inner(x + torch.from_numpy(0.2 * np.random.standard_normal(x.shape)).float())


def dropped_by_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 0.3 else x + block.inner(x)


def dropped_by_torch(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand(()) < 0.3 else x + F.dropout(block.inner(x), 0.2, block.training)


def annealed(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.temperature = max(0.5, 0.9 * block.temperature)
    return x + torch.tanh(block.inner(x) / block.temperature)


def cycled(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + next(block.scales) * block.inner(x)


def logging(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.log.append(x.norm().item())
    return x + block.inner(x)


def centred(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean.lerp_(x.detach().mean(0), 0.1)
    return x + block.inner(x - block.mean)


def checkpointed(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + checkpoint(block.inner, x, use_reentrant=False)


KINDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "plain": lambda block, x: x + block.inner(x),
    "in place": lambda block, x: (x + block.inner(x)).relu_(),
    **{
        f.__name__: f
        for f in (
            *(noisy, noisy_by_numpy, dropped_by_random, dropped_by_torch, annealed),
            *(cycled, logging, centred, checkpointed),
        )
    },
}


class Root(nn.Module):
    """Blocks in a row, some of them in groups, one perhaps twice."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.calls = 0
        self.stem = nn.Linear(WIDTH, WIDTH)
        blocks: list[nn.Module] = []
        for _ in range(pick.randint(2, 4)):
            block: nn.Module = Stateful(pick.choice([*KINDS]))
            if pick.random() < 0.3:
                block = nn.Sequential(block, nn.Tanh(), Stateful(pick.choice([*KINDS])))
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks)
        self.order = list(range(len(blocks)))
        if pick.random() < 0.3:
            self.order.append(pick.choice(self.order))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        x = self.stem(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


# Hooks --------------------------------------------------------------------------------------------


def count_by_hooks(model: nn.Module, pick: random.Random, seen: Counter[str]) -> None:
    """A hook of some kind on about every second module."""
    for name, module in model.named_modules():
        kind = pick.choice(["before", "after", "tensor", "backward", "", "", "", ""])

        def count(told: str = f"{kind} {name}") -> None:
            seen[told] += 1

        def on_tensor(m: Any, args: Any, out: Any, count: Any = count) -> None:
            if out.requires_grad:
                out.register_hook(lambda grad: count())

        if kind == "before":
            module.register_forward_pre_hook(lambda m, args, count=count: count())
        elif kind == "after":
            module.register_forward_hook(lambda m, args, out, count=count: count())
        elif kind == "tensor":
            module.register_forward_hook(on_tensor)
        elif kind == "backward" and name:
            module.register_full_backward_hook(lambda m, gi, go, count=count: count())


# Programs -----------------------------------------------------------------------------------------


def program(seed: int) -> Callable[[Run], None]:
    """All that a seed decides: model, hooks, and what the loop does in which step."""

    def body(run: Run) -> None:
        pick = random.Random(seed)
        seen: Counter[str] = Counter()
        model: Any = Root(pick)
        early = pick.random() < 0.5
        if early:
            count_by_hooks(model, pick, seen)
        model, optimizer = run.wrap(model)
        if not early:
            count_by_hooks(model, pick, seen)
        for step in range(4):
            loss = (model(batch(step, pick.choice([6, 6, 6, 4]))) - 1).square().mean()
            turn = pick.choice(["evaluates", "unused", "twice", "", "", ""])
            if turn == "evaluates":
                with torch.no_grad():
                    run.note(model.eval()(batch(step + 20)))
                model.train()
            elif turn == "unused":
                model(batch(step + 30))
            elif turn == "twice":
                loss = loss + model(batch(step + 40)).square().mean()
            loss.backward()
            run.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.count(counts(model), dict(seen))
        run.count(random.random(), float(np.random.rand()), torch.rand(2))

    body.__name__ = f"seed {seed}"
    return body


def counts(model: Any) -> list[Any]:
    """How often each forward ran, and what its generators say next."""
    blocks = [m for m in model.modules() if isinstance(m, Stateful)]
    told = [(b.kind, b.calls, b.inner_calls, b.temperature, list(b.log)) for b in blocks]
    return [model.calls, told, [b.generator.get_state() for b in blocks]]


def modes(seed: int) -> list[Mode]:
    """The default, another one in which everything fits, and one in which it does not."""
    pick = random.Random(seed)
    ssd = pick.random() < 0.5
    kept = Mode(pick.choice(UPDATES), pick.choice(KEPT), ssd=ssd)
    tight = Mode(pick.choice(UPDATES), pick.choice(KEPT), tight=True, ssd=not ssd)
    return [Mode(), kept, tight]


@pytest.mark.parametrize("seed", [int(ONE)] if ONE else range(SEEDS))
def test_what_is_called_runs_as_often_as_it_is_called(seed: int, tmp_path: Path) -> None:
    body = program(seed)
    for mode in modes(seed):
        print(f"seed {seed}: {mode}")
        Habit(body, once=True).check(mode, tmp_path)
