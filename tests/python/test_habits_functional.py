"""torch.func over a wrapped model, and parameters that are used outside of their modules."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import WIDTH, Block, Habit, Habits, Mode, Net, Run, batch, mean_loss
from torch import func, nn
from torch.nn import functional as F

HABITS = Habits()


def own(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@HABITS.add
def averaged_weights_evaluated(run: Run) -> None:
    """functional_call with a moving average, as one writes EMA today."""
    model, optimizer = run.wrap(Net())
    average = own(model)

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.2)
        run.note(func.functional_call(model, average, (batch(9),)), model(batch(9)))

    run.train(model, optimizer, then=evaluate)


@HABITS.add
def one_weight_exchanged(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for name in ("stem.weight", "blocks.1.up.weight", "head.bias"):
            zeros = torch.zeros_like(model.get_parameter(name))
            run.note(func.functional_call(model, {name: zeros}, batch(3)))

    run.train(model, optimizer, then=evaluate)


@HABITS.add
def gradients_of_each_sample(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def loss_of(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(model, weights, (x[None],)).square().mean()

    def look(step: int) -> None:
        each = func.vmap(func.grad(loss_of), (None, 0))(own(model), batch(step))
        run.note({name: g.flatten(1).norm(2, 1) for name, g in each.items()})

    run.train(model, optimizer, then=look, steps=2)


@HABITS.add
def jacobians(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def look(step: int) -> None:
        x = batch(step, 2)
        run.note(
            func.jacrev(lambda w: func.functional_call(model, w, (x,)))(own(model))["head.bias"]
        )

    run.train(model, optimizer, then=look, steps=2)


@HABITS.add
def forward_mode(run: Run) -> None:
    model, optimizer = run.wrap(Net())

    def look(step: int) -> None:
        x = batch(step, 2)
        weights = own(model)
        tangents = {name: torch.ones_like(value) for name, value in weights.items()}
        run.note(func.jvp(lambda w: func.functional_call(model, w, (x,)), (weights,), (tangents,)))

    run.train(model, optimizer, then=look, steps=2)


@HABITS.add
def inner_loop_of_meta_learning(run: Run) -> None:
    """MAML: the gradient goes through weights that came from parameters."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        weights = {name: p * 1 for name, p in m.named_parameters()}
        inner = (func.functional_call(m, weights, (batch(step),)) - 1).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer: torch.Tensor = (
            (func.functional_call(m, fast, (batch(step + 30),)) - 1).square().mean()
        )
        return outer

    run.train(model, optimizer, loss_of)


@HABITS.add
def parameters_handed_to_functional_call(run: Run) -> None:
    """dict(model.named_parameters()): its own, unchanged."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        out = func.functional_call(m, dict(m.named_parameters()), (batch(step),))
        return (out - 1).square().mean()

    run.train(model, optimizer, loss_of)


@HABITS.add
def ensembles_stacked(run: Run) -> None:
    models = [run.wrap(Net(count=2)) for _ in range(2)]
    for model, optimizer in models:
        run.train(model, optimizer, steps=2)
    weights, buffers = func.stack_module_state([model for model, _ in models])
    base = copy.deepcopy(Net(count=2)).to("meta")
    out = func.vmap(lambda w, b, x: func.functional_call(base, (w, b), (x,)), (0, 0, None))
    run.note(out({n: w.detach() for n, w in weights.items()}, buffers, batch(1)))


class Queries(Net):
    """DETR: learned queries are an argument of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Embedding(6, WIDTH)
        self.latent = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.blocks[0](self.query.weight)
        h = h + self.blocks[1](self.latent) + self.stem(x)
        return self.head(self.blocks[2](h))


@HABITS.add
def parameters_as_arguments(run: Run) -> None:
    run.train(*run.wrap(Queries()))


@HABITS.add
def views_of_parameters_as_arguments(run: Run) -> None:
    class Latents(Queries):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.blocks[0](self.latent.unsqueeze(0).expand(2, -1, -1)).mean(0)
            h = h + self.blocks[1](self.latent[:3]).repeat(2, 1) + self.stem(x)
            h = h + self.blocks[2](x=self.query.weight.t().t())
            return self.head(h + self.blocks[2](self.latent.view(2, 3, WIDTH)).view(6, WIDTH))

    run.train(*run.wrap(Latents()))


@HABITS.add
def class_token_and_positions(run: Run) -> None:
    """ViT: concatenated and added in the root's forward."""

    class Vit(Net):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.positions = nn.Parameter(0.02 * torch.randn(1, 4, WIDTH))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x).view(2, 3, WIDTH)
            x = torch.cat([self.token.expand(2, -1, -1), x], 1) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(x[:, 0])

    run.train(*run.wrap(Vit()))


@HABITS.add
def weights_of_another_module(run: Run) -> None:
    class Borrows(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            x = x + F.linear(x, self.stem.weight.t(), self.stem.bias)
            x = x + torch.einsum("bi,oi->bo", x, self.blocks[0].up.weight)[:, :WIDTH]
            for block in self.blocks:
                x = block(x) * self.blocks[1].norm.weight
            return self.head(x) @ self.head.weight[:, :4]

    run.train(*run.wrap(Borrows()))


@HABITS.add
def block_that_knows_another(run: Run) -> None:
    """A reference that is no sub-module: tied through a list."""

    class Knows(Block):
        others: list[Any]

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) + F.linear(x, self.others[0].weight)

    plain = Net(Knows)
    for block in plain.blocks:
        block.others = [plain.stem]
    run.train(*run.wrap(plain))


@HABITS.add
def contrastive_temperature(run: Run) -> None:
    """CLIP: a parameter of the root, used by the loss outside."""

    class Clip(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    def loss_of(m: Any, step: int) -> torch.Tensor:
        out = F.normalize(m(batch(step)))
        logits = m.scale.exp() * out @ out.t()
        return F.cross_entropy(logits, torch.arange(6))

    model, optimizer = run.wrap(Clip())

    def bound(step: int) -> None:
        with torch.no_grad():
            model.scale.clamp_(0, 1.02)

    run.train(model, optimizer, loss_of, then=bound)


@HABITS.add
def weights_made_by_another_network(run: Run) -> None:
    """A hypernetwork."""

    class Hyper(Net):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.randn(3, 8))
            self.maker = nn.Linear(8, WIDTH * WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.stem(x)
            for code, block in zip(self.code, self.blocks, strict=True):
                x = block(F.linear(x, 0.1 * self.maker(code).view(WIDTH, WIDTH)))
            return self.head(x)

    run.train(*run.wrap(Hyper()))


@HABITS.add
def loss_module_with_parameters(run: Run) -> None:
    """ArcFace, centre loss: a module beside the model, in one optimizer."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.loss = nn.Linear(4, 6, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    def loss_of(m: Any, step: int) -> torch.Tensor:
        out = m(batch(step))
        cosine = F.linear(F.normalize(out), F.normalize(m.loss.weight))
        return F.cross_entropy(4 * cosine, torch.arange(6)) + mean_loss(m.net, step)

    run.train(*run.wrap(Both()), loss_of)


@HABITS.add
def parts_called_by_the_loop(run: Run) -> None:
    """encode() and decode(): the root's forward is never called."""
    model, optimizer = run.wrap(Net())

    def loss_of(m: Any, step: int) -> torch.Tensor:
        hidden = m.stem(batch(step))
        for block in reversed(m.blocks):
            hidden = block(hidden)
        return (m.head(hidden) - 1).square().mean()

    run.train(model, optimizer, loss_of)


@pytest.mark.parametrize(("habit", "mode"), HABITS.cases())
def test_functional(habit: Habit, mode: Mode, tmp_path: Path) -> None:
    habit.check(mode, tmp_path)
