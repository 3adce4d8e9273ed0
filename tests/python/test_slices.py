"""Units that run on slices of the batch: the same within rounding, and never where it is wrong."""

import logging
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import (
    VOCABULARY,
    ConvNet,
    adamw,
    assert_same,
    build,
    gpt2,
    llama,
    t5,
    tight,
)
from stacks import Blocks, blocks
from strata._runtime.wrapped import wrapped
from torch import nn
from torch.nn import functional as F

Make = Callable[[], nn.Module]


def without_dropout(make: Make) -> Make:
    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("attention_dropout", "dropout"):  # probabilities of functions
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model

    return made


MODELS: dict[str, Make] = {"llama": llama, "gpt2": gpt2, "t5": t5}


def train(
    model: nn.Module, optimizer: Any, rows: int = 5, lengths: tuple[int, ...] = (12,)
) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (rows, lengths[step % len(lengths)]))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sliced(make: Make, count: int) -> tuple[Any, Any]:
    model, optimizer = tight(build(make))
    for unit in wrapped(model).units:
        if unit.may_recompute:
            unit.activation, unit.slices = "recompute", count
    return model, optimizer


@pytest.mark.parametrize("count", [2, 3, 64])
@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_same_within_rounding(core: ModuleType, name: str, count: int) -> None:
    make = without_dropout(MODELS[name])
    plain = build(make)
    expected = train(plain, adamw(plain))
    model, optimizer = sliced(make, count)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    assert_same(model, plain, 1e-4)
    layers = [u for u in wrapped(model).units if re.search(r"\.\d", u.name)]
    assert layers
    for unit in layers:
        assert unit.slices_max == 5, unit.unsplit_reason


@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_same_bits_twice(core: ModuleType, name: str) -> None:
    """With dropout: each slice draws its own numbers, and the same ones when recomputed."""
    model, optimizer = sliced(MODELS[name], 2)
    other, optimizer_of_other = sliced(MODELS[name], 2)
    losses = train(model, optimizer, lengths=(12, 7))
    assert train(other, optimizer_of_other, lengths=(12, 7)) == losses
    assert_same(model, other)


def test_dropout_is_the_same_in_both_runs(core: ModuleType) -> None:
    """A wrong mask in the recomputation gives the gradient of another function."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.inner(x), 0.5)

    def make() -> nn.Module:
        model: Any = blocks(lambda self, x: self.blocks[0](x))()
        model.blocks[0] = nn.Sequential(Dropped())
        return model

    model, _ = sliced(make, 2)
    x = torch.ones(4, 48)
    model(x)  # the trial
    model.embed.register_forward_hook(lambda m, a, out: torch.ones(4, 48, requires_grad=True))
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(x).sum().backward()
    (y,) = seen
    mask = (y != 0).float()
    assert 0 < mask.mean() < 1
    # The gradient of the block's bias: what reaches each output, times its mask.
    into = torch.autograd.grad(model.head(y.detach().requires_grad_()).sum(), seen[-1])[0]
    expected = (into * mask * 2).sum(0)
    torch.testing.assert_close(wrapped_grad(model.blocks[0][0].inner.bias), expected)


def wrapped_grad(parameter: torch.Tensor) -> torch.Tensor:
    slot = parameter._strata  # type: ignore[attr-defined]
    return slot.state.read(slot.index, "grad")


def test_the_cache_of_keys_is_that_of_the_whole(core: ModuleType) -> None:
    """Two forwards that share a cache: the second is given keys and values to cut."""

    def run(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (3, 8))
        first = model(tokens, labels=tokens)
        second = model(tokens, labels=tokens, past_key_values=first.past_key_values)
        layers = second.past_key_values.layers
        keys = [t.detach() for layer in layers for t in (layer.keys, layer.values)]
        (first.loss + second.loss).backward()
        return [*keys, torch.stack([first.loss, second.loss]).detach()]

    plain = build(llama)
    expected = run(plain)
    model, _ = sliced(llama, 2)
    for a, b in zip(run(model), expected, strict=True):
        torch.testing.assert_close(a, b)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(wrapped_grad(p), q.grad)
    assert wrapped(model).units[1].slices_max == 3


def test_gradients_of_inputs_and_of_what_is_not_cut(core: ModuleType) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, Any]:
            y = torch.tanh(self.inner(x) + shift)
            return {"y": y, "both": (y * 2, None), "shift": shift * 3}

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        shift = self.embed.bias[None] * 0.5
        for block in self.blocks:
            out = block(x, shift=shift)
            x = x + out["y"] + out["both"][0] + out["shift"]
        return x

    def make() -> nn.Module:
        model: Any = blocks(run)()
        model.blocks = nn.ModuleList(Mixed() for _ in range(3))
        return model

    def gradients(count: int) -> list[torch.Tensor]:
        model, _ = tight(
            build(make),
            units=lambda name, m: isinstance(m, Mixed),
            memory={"device": "256KiB", "host": "64MiB"},
            page_size="64KiB",
        )
        for unit in wrapped(model).units[1:-1]:
            unit.activation, unit.slices = "recompute", count
        torch.manual_seed(1)
        x = torch.randn(5, 48, requires_grad=True)
        model(x).square().sum().backward()
        assert all(u.slices_max == (5 if count > 1 else 1) for u in wrapped(model).units[1:-1])
        return [x.grad, *(wrapped_grad(p) for p in model.parameters())]  # type: ignore[list-item]

    for a, b in zip(gradients(2), gradients(1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_refused_units_run_whole_and_say_why(
    core: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "strata")
    model, optimizer = sliced(ConvNet, 2)
    torch.manual_seed(1)
    for _ in range(2):
        images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
        model(images, labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    unit = next(u for u in wrapped(model).units if u.name == "stages.1")
    assert unit.slices_max == 1
    assert unit.unsplit_reason == "norm normalises over the batch"
    told = [r.message for r in caplog.records if r.message.startswith("stages.1 runs on the whole")]
    assert len(told) == 1
    assert unit.unsplit_reason in told[0]


def test_a_form_that_was_not_tried_is_not_cut(core: ModuleType) -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(48, 48)
            self.extra = False

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.tanh(self.inner(x))
            return (y, y.square().mean()) if self.extra else (y,)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + sum(y for y in self.blocks[0][0](x))

    def make() -> nn.Module:
        model: Any = blocks(run)()
        model.blocks[0] = nn.Sequential(Fickle())
        return model

    def loss(slices: int) -> tuple[float, Any]:
        model, _ = tight(build(make), units=["blocks.0.0"])
        unit = next(u for u in wrapped(model).units if u.name == "blocks.0.0")
        unit.activation, unit.slices = "recompute", slices
        x = torch.linspace(-1, 1, 4 * 48).reshape(4, 48)
        model(x)
        assert unit.slices_max == (4 if slices > 1 else 1)
        model.blocks[0][0].extra = True
        value = model(x).sum()
        value.backward()
        return value.item(), unit

    expected, _ = loss(1)
    found, unit = loss(2)
    assert found == expected
    assert (unit.slices_max, "another form" in unit.unsplit_reason) == (1, True)


def test_a_trial_while_recording_changes_nothing(core: ModuleType) -> None:
    """The planner learns how far units may be cut; the step is the one that it would have been."""

    def run(recording: bool) -> tuple[list[float], Any]:
        model, optimizer = sliced(gpt2, 1)
        if recording:
            wrapped(model).recorder.begin()
        losses = train(model, optimizer)
        wrapped(model).recorder.take()
        return losses, model

    expected, kept = run(recording=False)
    losses, model = run(recording=True)
    assert losses == expected
    assert_same(model, kept)
    assert all(u.slices_max == 5 for u in wrapped(model).units if ".h." in u.name)
    assert all(u.slices_max == 1 for u in wrapped(kept).units)


@pytest.mark.parametrize("slices", [1, 2])
def test_autocast(core: ModuleType, slices: int) -> None:
    """Casts of parameters that a trial makes have no gradient: nobody else may use them."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        wrapped(model).recorder.begin()
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(1)
            model(torch.randn(4, 48)).square().sum().backward()
        wrapped(model).recorder.take()
        return [wrapped_grad(p) for p in model.parameters()]

    kept, _ = tight(build(Blocks))
    wrapped(kept).may_split = False
    expected = gradients(kept)
    rounding = 0.0 if slices == 1 else 0.1
    for a, b in zip(gradients(sliced(Blocks, slices)[0]), expected, strict=True):
        assert torch.count_nonzero(a)
        torch.testing.assert_close(a, b, rtol=rounding, atol=0.1 * rounding)


def test_trials_can_be_forbidden(core: ModuleType) -> None:
    model, _ = sliced(Blocks, 2)
    wrapped(model).may_split = False
    wrapped(model).recorder.begin()
    model(torch.randn(4, 48)).sum().backward()
    wrapped(model).recorder.take()
    assert all(u.slices_max == 1 and not u.unsplit_reason for u in wrapped(model).units)
