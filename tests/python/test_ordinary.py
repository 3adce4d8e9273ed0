"""Ordinary training code next to plain PyTorch, with one unit at a time on the device."""

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
from stacks import Blocks, blocks, compare, steps
from torch import nn
from torch.nn import functional as F


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


@pytest.mark.parametrize("form", ["int8", "nf4", "nf4-double"])
def test_a_base_of_codes_computes_with_its_values(form: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(192, 320), nn.LayerNorm(320), nn.Tanh(), nn.Linear(320, 64), nn.LayerNorm(64)
        ).bfloat16()
        for layer in (model[0], model[3]):
            layer.requires_grad_(False)
        return model

    model, plain = build(make), build(make)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    memory = {"device": "64MiB", "host": "64MiB"}
    model, optimizer = strata.wrap(model, optimizer, memory=memory, frozen=form)
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    x = torch.randn(4, 192, dtype=torch.bfloat16)
    for _ in range(3):
        out = model(x)
        assert torch.equal(out, plain(x))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


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
    model, optimizer = tight(build(Blocks), gradient_accumulation_steps=backwards)
    assert steps(model, optimizer, backwards=backwards) == pytest.approx(expected, rel=1e-6)
    assert_same(model, plain, 1e-5)


@pytest.mark.parametrize("backwards", [2, 3])
def test_a_second_backward_need_not_be_announced(core: ModuleType, backwards: int) -> None:
    compare(Blocks, lambda model, optimizer: steps(model, optimizer, backwards=backwards))


def test_a_step_after_a_step_needs_zero_grad(core: ModuleType) -> None:
    model, optimizer = tight(build(Blocks))
    model(torch.randn(3, 48)).sum().backward()
    optimizer.step()
    model(torch.randn(3, 48)).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.step()
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
