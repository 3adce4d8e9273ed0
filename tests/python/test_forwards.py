"""Units that are computed again in backward: the same bits, and nothing counted twice."""

from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from recomputed_models import Counted, Counter, compare, recompute, recomputed, with_block
from small_models import (
    MODELS,
    ConvNet,
    Residual,
    batch,
    build,
    gpt2,
    llama,
    tight,
    train,
)
from stacks import Blocks, blocks, steps
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_recompute_changes_no_bit(core: ModuleType, name: str) -> None:
    """Dropout, tied weights, tuples, keyword arguments, shared tensors, caches, batch norm."""
    compare(MODELS[name], train)


def test_bfloat16(core: ModuleType) -> None:
    compare(llama, train, dtype=torch.bfloat16)


def test_it_recomputes_once(core: ModuleType) -> None:
    model, _ = recomputed(with_block(Counted))
    counted = model.blocks[2][0]
    model(torch.randn(3, 48)).sum().backward()
    assert counted.counter.runs == 4, "a trial of two runs comes first"
    counted.counter.runs = 0
    model(torch.randn(3, 48)).sum().backward()
    assert counted.counter.runs == 2
    with torch.no_grad():
        model(torch.randn(3, 48))
    assert counted.counter.runs == 3


def test_nothing_is_kept(core: ModuleType) -> None:
    def held(keep: bool) -> int:
        model, _ = tight(build(Blocks))
        if not keep:
            recompute(model)
        found = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(torch.randn(3, 48))
        return sum(found)

    assert held(keep=False) < held(keep=True)


def test_batch_statistics_are_updated_once(core: ModuleType) -> None:
    model, optimizer = recomputed(ConvNet)
    train(model, optimizer, steps=3)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [norm.num_batches_tracked.item() for norm in norms] == [3] * len(norms)


def test_statistics_that_the_forward_reads(core: ModuleType) -> None:
    """The second run must see what the first one saw, and a change of mode be noticed."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)
            self.register_buffer("centre", torch.zeros(48))
            self.centre: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.inner(x - self.centre)) * torch.exp(-self.centre)
            if self.training:
                self.centre = 0.5 * self.centre + y.detach().mean(0)
            return y

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model.eval(), optimizer, 1) + steps(model.train(), optimizer, 3)
        return losses + steps(model.eval(), optimizer, 1)

    compare(with_block(Centred), loop)


def test_two_backwards_through_one_graph(core: ModuleType) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 16, 8, 8)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def make() -> nn.Module:
        return nn.Sequential(*[Residual(16) for _ in range(3)])

    compare(make, loop, gradient_accumulation_steps=2)


def test_the_cache_of_keys_is_that_of_plain_pytorch(core: ModuleType) -> None:
    def keys(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        first = model(**batch(model))
        second = model(**batch(model), past_key_values=first.past_key_values)
        cache = second.past_key_values
        found = [t.detach().clone() for layer in cache.layers for t in (layer.keys, layer.values)]
        (first.loss + second.loss).backward()
        return [*found, torch.stack([first.loss, second.loss]).detach()]

    plain = build(llama)
    expected = keys(plain)
    model, _ = recomputed(llama)
    for a, b in zip(keys(model), expected, strict=True):
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(strata.gather_grad(p), q.grad)


def test_a_list_in_the_arguments_is_filled_once(core: ModuleType) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor, told: list[torch.Tensor]) -> torch.Tensor:
            y = torch.tanh(self.inner(x))
            told.append(y.square().mean())
            return y * len(told)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        told: list[torch.Tensor] = []
        for block in self.blocks:
            x = x + block(x, told=told)
        self.told = len(told)
        return x + sum(told)

    def make() -> nn.Module:
        model: Any = blocks(run)()
        model.blocks = nn.ModuleList(Told() for _ in range(3))
        return model

    model: Any = compare(lambda: make(), units=lambda name, m: isinstance(m, Told))
    assert model.told == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "within"])
def test_checkpoints_of_the_user(core: ModuleType, where: str, reentrant: bool) -> None:
    class Inner(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "around":
                return super().forward(x)
            return x + checkpoint(super().forward, x, use_reentrant=reentrant)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            around = where == "around"
            x = x + (checkpoint(block, x, use_reentrant=reentrant) if around else block(x))
        return x

    def make() -> nn.Module:
        model: Any = with_block(Inner)()
        model.run = run
        return model

    model: Any = compare(make)
    model.blocks[2][0].counter.runs = 0
    model(torch.randn(3, 48)).sum().backward()
    # Ours stops early: where only the user's is left to run, and saved its input, it is not run.
    assert model.blocks[2][0].counter.runs == (3 if where == "within" and reentrant else 2)


def test_checkpoints_of_transformers(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    compare(make, train)


def test_hooks_of_the_user_on_saved_tensors(core: ModuleType) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        with torch.autograd.graph.save_on_cpu():
            return steps(model, optimizer)

    compare(Blocks, loop)


def test_evaluation_and_generation_between(core: ModuleType) -> None:
    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for i in range(3):
            losses += train(model, optimizer, 1, seed=i)
            with torch.no_grad():
                losses.append(model.eval()(**batch(model)).loss.item())
            tokens = torch.arange(4).reshape(1, 4)
            made = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
            losses += made.float().flatten().tolist()
            model.train()
        return losses

    compare(gpt2, loop)


def test_frozen_units_are_not_recomputed(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = with_block(Counted)()
        for p in [*model.embed.parameters(), *model.blocks.parameters()]:
            p.requires_grad_(False)
        return model

    model: Any = compare(make)
    model.blocks[2][0].counter.runs = 0
    model(torch.randn(3, 48)).sum().backward()
    assert model.blocks[2][0].counter.runs == 1


def test_second_derivative(core: ModuleType) -> None:
    def penalty(model: nn.Module) -> list[torch.Tensor | None]:
        x = torch.linspace(-1, 1, 48).expand(2, 48).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [strata.gather_grad(p) for p in model.parameters()]

    expected = penalty(tight(build(Blocks))[0])
    found = penalty(recomputed(Blocks)[0])
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("when", [0, 1])
def test_an_exception_in_a_forward(core: ModuleType, when: int) -> None:
    """In the first run, and in the recomputation."""
    armed = Counter()
    armed.runs = -1

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.inner(x))
            armed.runs -= 1
            if armed.runs == -1:
                raise KeyError("boom")
            return y * torch.tanh(self.inner(y))

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer, 1)
        if wrapped(model).units[3].activation == "recompute":
            armed.runs = when
            with pytest.raises(KeyError, match="boom") as caught:
                model(torch.randn(3, 48)).sum().backward()
            assert when == 0 or "blocks.2" in caught.value.__notes__[0]
            armed.runs = -1
            optimizer.zero_grad()
        return losses + steps(model, optimizer, 2)

    compare(with_block(Fragile), loop)


def test_a_forward_that_first_differs_after_it_was_tried(core: ModuleType) -> None:
    moods = [0]

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moods[0] += moods[0] > 0
            y = self.inner(x)
            return y[:, :24].tanh().repeat(1, 2) if moods[0] % 2 else y.relu()

    model, optimizer = recomputed(with_block(Moody))
    steps(model, optimizer, 1)
    moods[0] = 1
    with pytest.raises(strata.StrataError, match=r"blocks\.2 cannot be recomputed.*keep"):
        model(torch.randn(3, 48)).sum().backward()
    optimizer.zero_grad()
    for unit in wrapped(model).units:
        unit.activation = "keep"
    steps(model, optimizer)
