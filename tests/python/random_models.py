"""Small models that nobody drew: blocks, ties, freezes and a training loop, all from one seed.

case = Case(seed)
losses, model = case.run(plain)      # plain(model, optimizer) -> the same, perhaps wrapped
"""

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 40
Pair = namedtuple("Pair", ["hidden", "scale"])
Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]


class Mlp(nn.Module):
    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        hidden = pick.choice([width, 2 * width, 3 * width + 1])
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=pick.random() < 0.5)
        self.down = nn.Linear(hidden, width)
        self.act = pick.choice([F.gelu, F.silu, torch.tanh])
        self.drop = nn.Dropout(pick.choice([0.0, 0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attend(y, y, y, need_weights=False)[0]


class Convolution(nn.Module):
    """Has statistics that the forward changes, and a count of what it has seen."""

    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, 3, padding=1, groups=pick.choice([1, 2]))
        self.norm = nn.BatchNorm1d(width)
        self.late_from = pick.randrange(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls > self.late_from:
                self.late += 1
        y = self.norm(self.inner(x.transpose(1, 2))).transpose(1, 2)
        return x + y / (1 + self.late)


class Recurrent(nn.Module):
    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        self.inner = pick.choice([nn.GRU, nn.LSTM])(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)[0]


class Scaled(nn.Module):
    """Owns a parameter, keeps a view of it, and hands out another in a named tuple."""

    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Pair:
        self.first = self.gain.detach()[:2]
        return Pair(x + self.inner(x) * self.gain, self.gain[1:])


class Sometimes(nn.Module):
    """Layer drop: in some steps its parameters get no gradient."""

    def __init__(self, width: int, pick: random.Random) -> None:
        super().__init__()
        self.inner = Mlp(width, pick)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if not self.training or torch.rand(()) < 0.5 else x


BLOCKS = (Mlp, Attention, Convolution, Recurrent, Scaled, Sometimes)


class RandomModel(nn.Module):
    """Embedding, blocks, head. A block may be called twice, frozen, or one with another."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        width = pick.choice([8, 12, 20])
        self.embed = nn.Embedding(
            VOCABULARY, width, max_norm=pick.choice([None, None, None, 0.9 * width**0.5])
        )
        self.blocks = nn.ModuleList(
            pick.choice(BLOCKS)(width, pick) for _ in range(pick.randint(2, 6))
        )
        self.order = list(range(len(self.blocks)))
        if pick.random() < 0.4:  # one is called twice
            self.order.insert(pick.randrange(len(self.order) + 1), pick.choice(self.order))
        self.head = nn.Linear(width, VOCABULARY, bias=pick.random() < 0.5)
        if pick.random() < 0.3 and self.embed.max_norm is None:
            self.head.weight = self.embed.weight
        if pick.random() < 0.3:
            pick.choice(self.blocks).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        extra = x.new_zeros(())
        for i in self.order:
            x = self.blocks[i](x)
            if isinstance(x, Pair):
                extra = extra + x.scale.square().mean()
                x = x.hidden
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 1e-3 * extra


class Case:
    """Everything that a seed decides: model, optimizer, schedule, evaluation between steps."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        pick = random.Random(seed)
        self._model_seed = pick.getrandbits(32)
        # These run torch's own arithmetic element by element (RMSprop), or a kernel (the others).
        self.optimizer = pick.choice(["RMSprop", "RMSprop", "AdamW", "SGD"])
        self.exact = self.optimizer == "RMSprop"
        self.groups = pick.choice([1, 2])
        self.decay = pick.choice([1.0, 0.5])
        self.evaluates = pick.random() < 0.3
        self.steps = 6

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self._model_seed)
        model = RandomModel(random.Random(self._model_seed))
        trained = [p for p in model.parameters() if p.requires_grad]
        half = len(trained) // 2 if self.groups == 2 else 0
        groups = [{"params": trained[half:]}]
        if half:
            groups.append({"params": trained[:half], "lr": 2e-3})
        options: dict[str, Any] = {
            "RMSprop": {"foreach": False},
            "AdamW": {"eps": 1e-3, "weight_decay": 0.1},
            "SGD": {"momentum": 0.9, "weight_decay": 0.01},
        }[self.optimizer]
        return model, getattr(torch.optim, self.optimizer)(groups, lr=5e-3, **options)

    def run(self, wrap: Wrap) -> tuple[list[float], nn.Module]:
        """Trains. Returns all losses, and the model as `wrap` returned it."""
        model, optimizer = wrap(*self._build())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        torch.manual_seed(1)
        losses = []
        for _ in range(self.steps):
            loss = model(torch.randint(VOCABULARY, (3, 7)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if self.evaluates:
                with torch.no_grad():
                    losses.append(model.eval()(torch.randint(VOCABULARY, (2, 5))).item())
                model.train()
        return losses, model
