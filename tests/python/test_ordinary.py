"""Ordinary training code next to plain PyTorch, with one unit at a time on the device."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from small_models import (
    VOCABULARY,
    ConvNet,
    adamw,
    assert_same,
    batch,
    build,
    gpt2,
    llama,
    tight,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A stack of blocks; what is done with them is up to the test."""

    def __init__(self, count: int = 4, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.head = nn.Linear(width, width)
        self.run: Callable[[Any, torch.Tensor], torch.Tensor] = Blocks.plain_run

    def plain_run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.run(self, self.embed(x)))
        return out


def steps(model: nn.Module, optimizer: Any, count: int = 3, backwards: int = 1) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(count):
        for _ in range(backwards):
            loss = model(torch.randn(3, 48)).square().mean() / backwards
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(
    make: Callable[[], nn.Module], loop: Callable[..., list[float]] = steps, rel: float = 1e-6
) -> nn.Module:
    """Runs the loop on a plain model and on a wrapped one; the wrapped one is returned."""
    plain = build(make)
    expected = loop(plain, adamw(plain))
    model, optimizer = tight(build(make))
    assert loop(model, optimizer) == pytest.approx(expected, rel=rel)
    assert_same(model, plain, 10 * rel)
    return model


def blocks(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Blocks()
        model.run = run
        return model

    return make


def test_tied_weights(core: ModuleType) -> None:
    def make() -> nn.Module:
        return llama(tie_word_embeddings=True)

    model = compare(make, train)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_frozen_parameters_stay(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = Blocks()
        for p in model.blocks[1].parameters():
            p.requires_grad_(False)
        model.embed.weight.requires_grad_(False)
        return model

    before = build(make).blocks[1][0].weight.detach()  # type: ignore[index]
    model = compare(make)
    assert torch.equal(model.blocks[1][0].weight, before)  # type: ignore[index]


def test_unused_parameters_stay(core: ModuleType) -> None:
    compare(blocks(lambda self, x: x + self.blocks[0](x) + self.blocks[3](x)))


def test_a_module_called_twice(core: ModuleType) -> None:
    compare(blocks(lambda self, x: self.blocks[1](self.blocks[0](self.blocks[1](x)))))


def test_parameters_read_by_the_parent(core: ModuleType) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(F.gelu(F.linear(x, block[0].weight, block[0].bias)), block[2].weight)
        return x * self.head.weight.norm() + self.embed.weight[0]

    compare(blocks(run))


def test_penalty_on_parameters_outside_the_model(core: ModuleType) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(3, 48)).square().mean()
            for p in model.parameters():
                loss = loss + 1e-2 * p.norm() + 1e-3 * (p.view(-1)[:5] ** 3).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(Blocks, loop)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_whole_blocks(core: ModuleType, reentrant: bool) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return x

    compare(blocks(run))


def test_checkpoint_of_several_blocks_and_outside_reads(core: ModuleType) -> None:
    def segment(self: Any, x: torch.Tensor, i: int) -> torch.Tensor:
        x = x + self.blocks[i](x)
        x = x + F.linear(x, self.embed.weight)  # read outside its module, under checkpoint
        return x + self.blocks[i + 1](x)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 2):
            x = checkpoint(segment, self, x, i, use_reentrant=False)
        return x

    model, optimizer = build(blocks(run)), None
    plain = copy.deepcopy(model)
    expected = steps(plain, adamw(plain))
    # The parameter read outside stays on the device for the whole segment: room for two units.
    model, optimizer = tight(model, memory={"device": "256KiB", "host": "64MiB"}, page_size="64KiB")
    assert steps(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_checkpoint_inside_a_block(core: ModuleType) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(48, 96)
            self.down = nn.Linear(96, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda v: self.down(F.gelu(self.up(v))), x, use_reentrant=False)
            return x + F.linear(y, self.up.weight.t() @ self.down.weight.t())

    def make() -> nn.Module:
        model = Blocks()
        model.blocks = nn.ModuleList(Inner() for _ in range(4))
        return model

    compare(make)


def test_transformers_gradient_checkpointing(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    compare(make, train)


def test_checkpoint_recomputes(core: ModuleType) -> None:
    """Our hooks must not keep from checkpoint what it is there to drop."""
    runs = []

    def counted(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + block(x)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(counted, block, x, use_reentrant=False)
        return x

    model, _ = tight(build(blocks(run)))
    model(torch.randn(3, 48)).sum().backward()
    assert len(runs) == 2 * len(model.blocks)


def test_somebody_elses_saved_tensor_hooks(core: ModuleType) -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return steps(model, optimizer)

    compare(Blocks, loop)
    assert packed


def test_dropout_and_autocast(core: ModuleType) -> None:
    def make() -> nn.Module:
        model = gpt2()
        assert any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
        return model

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch(model)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(make, loop, rel=1e-3)


def test_buffers_and_evaluation_between_steps(core: ModuleType) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(**batch(model)).loss
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                losses.append(model(**batch(model)).loss.item())
            model.train()
            optimizer.zero_grad()
        return losses

    model = compare(ConvNet, loop)
    assert model.norm.num_batches_tracked == 3  # type: ignore[union-attr]


def test_generate(core: ModuleType) -> None:
    plain = build(llama).eval()
    prompt = torch.randint(0, VOCABULARY, (1, 4))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(prompt, **options)
    model, optimizer = tight(build(llama))
    assert torch.equal(model.eval().generate(prompt, **options), expected)
    train(model.train(), optimizer, steps=1)
    assert model.eval().generate(prompt, **options).shape == expected.shape


def test_state_dict_round_trip(core: ModuleType) -> None:
    model, optimizer = tight(build(llama))
    train(model, optimizer)
    plain = build(llama, seed=5)
    plain.load_state_dict(model.state_dict())
    assert_same(model, plain)
    other, _ = tight(build(llama, seed=7))
    other.load_state_dict(plain.state_dict())
    assert_same(other, plain)


def test_loading_float32_into_bfloat16_keeps_every_bit(core: ModuleType) -> None:
    exact = build(llama, seed=3)
    model, _ = tight(build(llama), dtype=torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert_same(strata.unwrap(model), exact)  # the model was float32 before wrap()


@pytest.mark.parametrize("backwards", [2, 3])
def test_several_backwards_in_a_step(core: ModuleType, backwards: int) -> None:
    plain = build(Blocks)
    expected = steps(plain, adamw(plain), backwards=backwards)
    model, optimizer = tight(build(Blocks), accumulation_steps=backwards)
    assert steps(model, optimizer, backwards=backwards) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


def test_a_second_backward_must_be_announced(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    model(torch.randn(3, 48)).sum().backward()
    with pytest.raises(RuntimeError, match="accumulation_steps"):
        model(torch.randn(3, 48)).sum().backward()
    optimizer.zero_grad()
    steps(model, optimizer)


def test_backward_after_step_needs_zero_grad(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    model(torch.randn(3, 48)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="zero_grad"):
        model(torch.randn(3, 48)).sum().backward()
    optimizer.zero_grad()
    steps(model, optimizer)


def test_zero_grad_forgets(core: ModuleType) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        model(torch.randn(3, 48)).sum().backward()
        optimizer.zero_grad()
        return steps(model, optimizer)

    compare(Blocks, loop)


def test_max_grad_norm(core: ModuleType) -> None:
    plain = build(Blocks)
    inner = adamw(plain)
    torch.manual_seed(1)
    for _ in range(3):
        plain(torch.randn(3, 48)).square().sum().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        inner.step()
        inner.zero_grad()
    model, optimizer = tight(build(Blocks), max_grad_norm=0.5)
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(3, 48)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, plain, 1e-5)


def test_skip_nonfinite(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks), skip_nonfinite=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model(torch.randn(3, 48)).sum() * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert strata.report(model).steps_skipped == 1
    steps(model, optimizer)


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no `except Exception` sees it."""


@pytest.mark.parametrize("kind", [ValueError, Interrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(
    core: ModuleType, where: str, kind: type[BaseException]
) -> None:
    armed = [False]

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "forward":
                raise kind("boom")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if armed[0] and where == "backward":
                raise kind("boom")
            return grad

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(Bomb.apply(self.inner(x)))
            return out

    def make() -> nn.Module:
        model = Blocks()
        model.blocks[2] = nn.Sequential(Fragile())
        return model

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer, 1)
        armed[0] = True
        with pytest.raises(kind, match="boom"):
            model(torch.randn(3, 48)).sum().backward()
        armed[0] = False
        optimizer.zero_grad()
        return losses + steps(model, optimizer, 2)

    compare(make, loop)


def test_two_wrapped_models(core: ModuleType) -> None:
    """Teacher and student, interleaved."""

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        teacher = build(Blocks, seed=9)
        if "_strata" in model.__dict__:
            teacher, _ = tight(teacher)
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            x = torch.randn(3, 48)
            with torch.no_grad():
                target = teacher(x)
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    compare(Blocks, loop)


def test_graph_kept_over_a_step_is_refused(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    old = model(torch.randn(3, 48)).square().sum()
    model(torch.randn(3, 48)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified"):
        old.backward()
    optimizer.zero_grad()
    steps(model, optimizer)


def test_activation_changed_in_place_is_noticed(core: ModuleType) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            z = y * y
            y.add_(1)
            return z

    model, _ = tight(nn.Sequential(Square(), nn.Sequential(nn.Linear(48, 48))))
    with pytest.raises(RuntimeError, match="modified"):
        model(torch.randn(2, 48)).sum().backward()


def test_autograd_grad(core: ModuleType) -> None:
    plain = build(Blocks)
    model, _ = tight(build(Blocks))
    x = torch.randn(3, 48)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivative(core: ModuleType) -> None:
    def penalty(model: nn.Module) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 48).expand(2, 48).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        if "_strata" in model.__dict__:
            return [strata.gather_grad(p) for p in model.parameters()]  # type: ignore[misc]
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    expected = penalty(build(Blocks))
    found = penalty(tight(build(Blocks))[0])
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
