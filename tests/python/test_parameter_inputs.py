"""A parameter, or a view of one, as an argument of another unit's forward."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import assert_same, build
from torch import nn
from torch.nn import functional as F

WIDTH = 16
ROOM: dict[str, Any] = {
    "memory": {"device": "384KiB", "host": "8MiB"},
    "page_size": "64KiB",
}
Form = Callable[["Queries"], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        if isinstance(context, dict):
            context = context["queries"][0]
        if isinstance(context, list):
            context = sum(context)
        if context is not None:
            x = x + context.mean(0)
        return x + self.down(torch.tanh(self.up(x)))


class Fused(torch.autograd.Function):
    """A loss that saves the weight itself, as kernels for large vocabularies do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).logsumexp(-1).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        share = torch.softmax(x @ weight.t(), -1) * grad
        return share @ weight, share.t() @ x


class Loss(nn.Module):
    """Owns a parameter, and is given another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor:
        x = x * self.gain
        return Fused.apply(x, weight) if fused else F.linear(x, weight).logsumexp(-1).sum()


class Queries(nn.Module):
    def __init__(self, form: Form, fused: bool = False) -> None:
        super().__init__()
        self.form, self.fused = form, fused
        self.queries = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.loss = Loss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, context=self.form(self))
        return self.loss(x, self.head.weight, self.fused) + x.square().mean()


FORMS: dict[str, Form] = {
    "nothing": lambda m: None,
    "weight": lambda m: m.queries.weight,
    "in a dictionary": lambda m: {"queries": (m.queries.weight, 1)},
    "in a list, twice": lambda m: [m.queries.weight, m.queries.weight],
    "expanded": lambda m: m.queries.weight.unsqueeze(0).expand(3, -1, -1)[1],
    "rows": lambda m: m.queries.weight[3:7],
    "transposed": lambda m: m.queries.weight.t().t(),
    "data": lambda m: m.queries.weight.data,
    "as rows of a batch": lambda m: m.blocks[0](m.head.weight),
}
MODES: dict[str, dict[str, Any]] = {
    "keep": {"activations": "keep"},
    "swap": {"activations": "swap"},
    "slices": {"activations": "recompute", "split": 2},
    "in_backward": {"update": "in_backward"},
    "bfloat16": {"dtype": torch.bfloat16},
}


def compare(form: Form, fused: bool = False, **more: Any) -> None:
    plain = build(lambda: Queries(form, fused)).to(more.get("dtype", torch.float32))
    model = build(lambda: Queries(form, fused))
    inner = torch.optim.SGD(plain.parameters(), lr=0.05)
    model, optimizer = strata.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.05), **ROOM, **more
    )
    x = torch.randn(4, WIDTH).to(model.head.weight.dtype)
    for _ in range(3):
        for m, o in ((plain, inner), (model, optimizer)):
            m(x).backward()
            o.step()
            o.zero_grad()
    assert_same(model, plain, 0.05 if "dtype" in more else 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_is_an_argument(core: ModuleType, form: str) -> None:
    compare(FORMS[form], activations="recompute")


@pytest.mark.parametrize("mode", MODES)
def test_in_every_mode(core: ModuleType, mode: str) -> None:
    compare(FORMS["weight"], fused=True, **MODES[mode])


def test_a_step_between_forward_and_backward_is_noticed(core: ModuleType) -> None:
    """Only what is recomputed reads the values of the parameter again."""
    model = build(lambda: Queries(FORMS["weight"]))
    model, _ = strata.wrap(
        model, torch.optim.SGD(model.parameters()), **ROOM, activations="recompute"
    )
    model(torch.ones(4, WIDTH)).backward()
    loss = model(torch.ones(4, WIDTH))
    with torch.no_grad():
        model.queries.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"queries\.weight: it was updated"):
        loss.backward()


def test_a_parameter_of_another_model(core: ModuleType) -> None:
    """Each model's hooks are asked for the tensors of the other one."""
    plain, other = (build(lambda: Queries(FORMS["nothing"])) for _ in range(2))
    pair = [build(lambda: Queries(FORMS["nothing"])) for _ in range(2)]
    wrapped = [
        strata.wrap(m, torch.optim.SGD(m.parameters(), lr=0.1), **ROOM, activations="recompute")[0]
        for m in pair
    ]
    for m, n in ((plain, other), wrapped):
        m.loss(torch.ones(4, WIDTH), n.head.weight, True).backward()
        m.blocks[0](torch.ones(4, WIDTH), n.queries.weight).sum().backward()
    for m, n in ((plain, wrapped[0]), (other, wrapped[1])):
        for (name, p), q in zip(m.named_parameters(), n.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.allclose(p.grad, q.grad.clone()), name
