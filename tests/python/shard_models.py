"""A model whose parameters are DTensors of a tensor-parallel mesh, and how plain PyTorch trains it:
for rank_shards.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rank_loops import Rank
from torch import distributed, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH = 48
TOKENS = 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = False
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 4)  # 37 for each of four
        self.down = nn.Linear(3 * WIDTH + 4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints and self.training:
            return x + checkpoint(self._inside, x, use_reentrant=False)
        return x + self._inside(x)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self) -> torch.Tensor:
        return self.weight  # the parameter itself


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outside = False
        self.embed = nn.Embedding(TOKENS, WIDTH)  # one process has more rows
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, TOKENS)  # whole in all processes, and no DTensor
        self.scale = Scale()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.outside:  # parameters of others, cut, and as their module returns them
            first, second = self.blocks[0].up.bias.chunk(2)  # type: ignore[union-attr]
            both: Any = first.sum() + second.mean()
            scale: Any = self.scale()
            x = x * scale.to_local() + both.full_tensor()
        return self.head(x)


def mesh_of(run: Rank, shape: tuple[int, ...]) -> DeviceMesh:
    """Its last dimension is "tp"; ahead of it is "dp", where there is another."""
    return distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def spread(model: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    """As people spread a Transformer."""
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    for block in model.blocks:  # type: ignore[union-attr]
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        first = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        last = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        parallelize_module(model, mesh, {"blocks.0": first, "head": last})
    return model


def make_model(kind: str = "") -> Model:
    """`kind`: "checkpoint": blocks compute twice by themselves; "frozen": some parameters are;
    "outside": the model computes with parameters of its modules."""
    torch.manual_seed(0)
    model = Model()
    model.outside = kind == "outside"
    for block in model.blocks:
        block.checkpoints = kind == "checkpoint"
        block.up.requires_grad_(kind != "frozen")
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0, foreach=False),
}


def make(kind: str, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    """Spread over the mesh. `kind`: likewise; "tied": the head has the weight of the embedding."""
    model = spread(make_model(kind), mesh, sequence)
    if kind == "tied":
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        model.head.weight = model.embed.weight  # type: ignore[union-attr]
    scale: Any = model.scale
    scale.weight = nn.Parameter(distribute_tensor(scale.weight.detach(), mesh, [Replicate()]))
    return model


def batch_of(step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(0, TOKENS, (4, 8), generator=generator)


def train(
    model: nn.Module,
    optimizer: Any,
    parts: list[int],
    steps: int = 4,
    clip: float = 0.0,
    first: int = 0,
) -> list[float]:
    """Returns the norms of the gradients. The batches of a step are `parts` of it."""
    norms = []
    for step in range(first, first + steps):
        for part in parts:
            tokens = batch_of(step, part)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().flip(0))
            (loss / len(parts)).backward()
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                # A sum that PyTorch has not made yet: 2.8 would update with a part of it.
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if clip:
            norms.append(_clip(list(model.parameters()), clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _clip(parameters: list[nn.Parameter], most: float) -> float:
    """As clip_grad_norm_(), which does not take DTensors beside plain ones."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(grad, DTensor) for grad in grads):
        return float(torch.nn.utils.clip_grad_norm_(parameters, most))
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    whole = [float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms]
    norm = sum(n * n for n in whole) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, most / (norm + 1e-6)))
    return norm


def shards_of(model: nn.Module) -> list[torch.Tensor]:
    """What this process has of each parameter."""
    return [
        (p.to_local() if isinstance(p, DTensor) else p).detach().clone().float()
        for p in model.parameters()
    ]


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, by the largest value of the parameter."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in pairs)


def plain(
    mesh: DeviceMesh,
    parts: list[int],
    sequence: bool,
    clip: float,
    kind: str = "",
    optimizer: str = "adamw",
) -> tuple[list[torch.Tensor], list[float]]:
    model = make(kind, mesh, sequence)
    norms = train(model, OPTIMIZERS[optimizer](model.parameters()), parts, clip=clip)
    return shards_of(model), norms
