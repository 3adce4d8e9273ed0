"""Forwards that people write: how they are called, what they return, and where autograd is used
inside."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn
from torch.nn import functional as F

HABITS = Habits()


@HABITS.add
def called_so_often_as_the_step_says(run: Run) -> None:
    """A universal transformer: one block, more and more often."""

    class Depth(Net):
        depth = 1

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for _ in range(self.depth):
                x = self.blocks[0](x)
            return self.head(self.blocks[1](x))

    model, optimizer = run.wrap(Depth())

    def deeper(step: int) -> None:
        model.depth = step + 2

    run.train(model, optimizer, then=deeper)


@HABITS.add
def early_exit(run: Run) -> None:
    class Exits(Net):
        used = 0

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                self.used += 1
                x = block(x)
                if x.abs().max() > 2.5:
                    break
            return self.head(x)

    model, optimizer = run.wrap(Exits())
    run.train(model, optimizer)
    run.note(model.used)


@HABITS.add
def cache_by_length(run: Run) -> None:
    """Rotary tables and masks: made once for each length."""

    class Cached(Block):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}
            self.made = 0

        def forward(self, x: torch.Tensor) -> Any:
            if x.shape[0] not in self.tables:
                self.made += 1
                self.tables[x.shape[0]] = torch.arange(x.shape[0]).float().cos()[:, None]
            return x + self.inner(x * self.tables[x.shape[0]])

    model, optimizer = run.wrap(Net(Cached))
    run.train(model, optimizer, lambda m, step: m(batch(step, 4 + step % 2)).square().mean())
    run.note([block.made for block in model.blocks])


@dataclass
class Output:
    """What a model of one's own returns."""

    loss: torch.Tensor
    hidden: list[torch.Tensor]
    extra: dict[str, Any] | None = None


@HABITS.add
def dataclasses_and_dicts(run: Run) -> None:
    class Dict(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0, mask: Any = None) -> Any:  # type: ignore[override]
            return {"x": x + scale * self.inner(x), "mask": mask, "n": x.shape[0], "name": "block"}

    class Whole(Net):
        def forward(self, x: torch.Tensor, target: Any = None, *, hidden: bool = True) -> Any:  # type: ignore[override]
            states = [self.stem(x)]
            for i, block in enumerate(self.blocks):
                states.append(block(x=states[-1], scale=0.5 * i, mask=None)["x"])
            loss = F.mse_loss(self.head(states[-1]), target)
            return Output(loss, states if hidden else [], {"last": states[-1]})

    def loss_of(model: Any, step: int) -> torch.Tensor:
        out = model(batch(step), target=torch.ones(6, 4), hidden=bool(step % 2))
        run.note(len(out.hidden), out.extra["last"])
        return out.loss + sum(1e-2 * h.square().mean() for h in out.hidden)

    run.train(*run.wrap(Whole(Dict)), loss_of)


@HABITS.add
def loss_on_what_the_forward_left(run: Run) -> None:
    """Balancing losses of experts, sparsity of activations: kept on self."""

    class Leaves(Block):
        def forward(self, x: torch.Tensor) -> Any:
            self.hidden = self.inner(x)
            self.aux = self.hidden.abs().mean()
            return x + self.hidden

    def loss_of(model: Any, step: int) -> torch.Tensor:
        loss = mean_loss(model, step)
        for block in model.blocks:
            loss = loss + 0.1 * block.aux + 0.01 * block.hidden.square().mean()
        return loss

    run.train(*run.wrap(Net(Leaves)), loss_of)


@HABITS.add
def experts_by_rows(run: Run) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            scores = self.gate(x).softmax(1)
            best = scores.argmax(1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (best == i).nonzero().flatten()
                if len(rows):
                    out[rows] = expert(x[rows]) * scores[rows, i : i + 1]
            return x + out

    run.train(*run.wrap(Net(Routed, 2)))


@HABITS.add
def branches_by_name(run: Run) -> None:
    class Tasks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 4), "b": nn.Linear(WIDTH, 2)})

        def forward(self, x: torch.Tensor, task: str) -> Any:  # type: ignore[override]
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.heads[task](x)

    run.train(*run.wrap(Tasks()), lambda m, i: m(batch(i), "ab"[i % 2]).square().mean())


@HABITS.add
def features_from_a_generator(run: Run) -> None:
    class Yields(Net):
        def features(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                yield x

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(sum(self.features(x)))  # type: ignore[arg-type]

    run.train(*run.wrap(Yields()))


class Pair(NamedTuple):
    """A result with an empty place."""

    x: torch.Tensor
    nothing: None
    parts: list[torch.Tensor]


@HABITS.add
def named_tuples_with_nothing_in_them(run: Run) -> None:
    class Pairs(Block):
        def forward(self, x: Any) -> Any:
            x = x.x if isinstance(x, Pair) else x
            out = x + self.inner(x)
            return Pair(out, None, [out[:2], out[2:]])

    class Ends(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out: Any = self.stem(x)
            for block in self.blocks:
                out = block(out)
            return self.head(torch.cat(out.parts))

    run.train(*run.wrap(Ends(Pairs)))


@HABITS.add
def list_that_is_passed_in(run: Run) -> None:
    class Appends(Block):
        def forward(self, x: torch.Tensor, seen: Any = None) -> Any:  # type: ignore[override]
            out = x + self.inner(x)
            seen.append(out.mean())
            return out

    class Collects(Net):
        def forward(self, x: torch.Tensor) -> Any:
            seen: list[torch.Tensor] = []
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, seen=seen)
            self.last = len(seen)
            return self.head(x) + torch.stack(seen).sum()

    model, optimizer = run.wrap(Collects(Appends))
    run.train(model, optimizer)
    run.note(model.last)


@HABITS.add
def output_that_is_a_parameter(run: Run) -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, rows: int) -> Any:
            return self.token, self.token.expand(rows, -1)

    class Prompted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = Token()

        def forward(self, x: torch.Tensor) -> Any:
            token, tokens = self.prompt(len(x))
            x = self.stem(x + tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x) + token.square().mean()

    run.train(*run.wrap(Prompted()))


@HABITS.add
def caller_in_double_precision_and_numpy(run: Run) -> None:
    class Thresholds(Block):
        def forward(self, x: torch.Tensor) -> Any:
            limit = float(x.detach().abs().numpy().max())
            return x + self.inner(x.clamp(-0.9 * limit, 0.9 * limit))

    run.train(*run.wrap(Net(Thresholds)), lambda m, i: mean_loss(m, i).double())


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_forwards(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
