"""What goes into a module and comes out of it: nests, named tuples, modules, nothing at all; and
graphs that people walk through."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import nn

HABITS = Habits()


class Checked(NamedTuple("Checked", [("x", Any), ("size", int)])):  # type: ignore[misc]
    """A named tuple whose constructor looks at what it gets."""

    def __new__(cls, x: Any, size: Any = None) -> Any:
        if x.dim() != 2:
            raise ValueError("rows and columns")
        return super().__new__(cls, x, x.shape[0] if size is None else size)


@HABITS.add
def named_tuple_with_a_constructor(run: Run) -> None:
    class Takes(Block):
        def forward(self, pair: Any) -> Any:
            assert isinstance(pair, Checked)
            return Checked(pair.x + self.inner(pair.x) / pair.size)

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> Any:
            pair = Checked(self.stem(x))
            for block in self.blocks:
                pair = block(pair)
            return self.head(pair.x)

    run.train(*run.wrap(Outer(Takes)))


@HABITS.add
def arguments_of_every_kind(run: Run) -> None:
    class Takes(Block):
        def forward(self, tensors: Any, *more: Any, how: Any = None, **rest: Any) -> Any:
            x = tensors["list"][0] + tensors["tuple"][1]
            assert more[1] is None
            assert rest["dtype"] is torch.float32
            assert rest["shape"] == torch.Size([6, WIDTH])
            rows = rest["rows"]
            return how(x[:, more[0]] + self.inner(x) * rest["mask"]) + x[rows].mean(), "text", None

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                tensors = {"list": [x], "tuple": (None, x * 0.1), "empty": []}
                mask = torch.ones(6, 1, dtype=torch.bool)
                rest = {"dtype": x.dtype, "shape": x.shape, "mask": mask, "rows": range(i + 1)}
                x, text, nothing = block(tensors, slice(None), None, how=torch.tanh, **rest)
                assert (text, nothing) == ("text", None)
            return self.head(x)

    run.train(*run.wrap(Outer(Takes)))


@HABITS.add
def module_as_an_argument(run: Run) -> None:
    class Takes(Block):
        def forward(self, x: torch.Tensor, norm: Any) -> Any:  # type: ignore[override]
            return x + self.inner(norm(x)) * norm.weight.mean()

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__(Takes)
            self.shared = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, self.shared)
            return self.head(x)

    run.train(*run.wrap(Outer()))


@HABITS.add
def blocks_that_return_their_input(run: Run) -> None:
    class Skips(Block):
        def forward(self, x: torch.Tensor, skips: bool = False) -> Any:  # type: ignore[override]
            return (x, x) if skips else (x + self.inner(x), x)

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> Any:
            before = x = self.stem(x)
            for i, block in enumerate(self.blocks):
                x, before = block(x, skips=i == 1)
            return self.head(x + before.view(6, WIDTH)[:, :])

    run.train(*run.wrap(Outer(Skips)))


@HABITS.add
def results_on_the_side(run: Run) -> None:
    """A block returns nothing, and writes into a dict that it was given."""

    class Writes(Block):
        def forward(self, state: Any) -> None:
            state["x"] = state["x"] + self.inner(state["x"])
            state["n"] += 1

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> Any:
            state = {"x": self.stem(x), "n": 0}
            for block in self.blocks:
                block(state)
            self.n = state["n"]
            return self.head(state["x"])

    model, optimizer = run.wrap(Outer(Writes))
    run.train(model, optimizer)
    run.note(model.n)


@HABITS.add
def graph_walked_through(run: Run) -> None:
    """torchviz: all nodes behind a loss, and the parameters at their ends."""
    model, optimizer = run.wrap(Net())
    names = {id(p): name for name, p in model.named_parameters()}

    def loss_of(m: Any, step: int) -> torch.Tensor:
        loss = mean_loss(m, step)
        ends, todo, seen = set(), [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                ends.add(names.get(id(node.variable), "unknown"))
            todo += [following for following, _ in node.next_functions]
        run.note(sorted(ends))
        return loss

    run.train(model, optimizer, loss_of)


@HABITS.add
def outputs_looked_at(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        out = m(batch(step))
        run.note(out.requires_grad, out.is_leaf, out.grad_fn.name(), out.shape, out.is_contiguous())
        run.note(out.detach().numpy().mean().item(), out.data.argmax(1), out.tolist()[0])
        hidden = m.blocks[0](m.stem(batch(step)))
        run.note(type(hidden).__name__, hidden.requires_grad, hidden.detach())
        return out.square().mean()

    run.train(model, optimizer, loss_of)


@HABITS.add
def compiled_block_from_before(run: Run) -> None:
    plain = Net(count=2)
    plain.blocks[0] = torch.compile(plain.blocks[0], backend="eager")
    model, optimizer = run.wrap(plain)
    run.train(model, optimizer, steps=3)
    torch._dynamo.reset()


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_arguments(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
