"""Toy models, and a plain training loop to hold strata against."""

from collections.abc import Callable
from typing import Any

import strata
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 64


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


class Residual(nn.Module):
    """A block with parameters of its own beside sub-modules, and with buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.second(F.relu(self.norm(self.first(x))))


class ConvNet(nn.Module):
    """A small residual network that returns an object with a loss, as Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.stages = nn.Sequential(*[Residual(16) for _ in range(3)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        images = images.to(self.head.weight.dtype)
        x = self.stages(F.relu(self.norm(self.stem(images)))).mean((2, 3))
        return Output(F.cross_entropy(self.head(self.drop(x)).float(), labels))


class Output:
    """What Transformers models return, as far as the loop looks."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def batch(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, ConvNet):
        return {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 10, (4,))}
    tokens = torch.randint(0, VOCABULARY, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "conv": ConvNet,
}


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


# A large eps: some gradients (a bias ahead of a norm) are zero but for rounding, and Adam would
# blow their rounding up to full size.
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{**ADAMW, **more})


def tight(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> Any:
    """Wraps a model so that only a part of it is ever on the device."""
    optimizer = optimizer or adamw(model)
    more.setdefault("activations", None)
    if "memory" not in more:
        needs = strata.plan(model, optimizer, memory={"host": "64MiB"}, page_size="64KiB", **more)
        more["memory"] = {"device": needs.plan["device_bytes_min"], "host": "64MiB"}
        more.setdefault("page_size", "64KiB")
    return strata.wrap(model, optimizer, **more)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, seed: int = 1
) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(**batch(model)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(model: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> None:
    """Parameters and buffers agree, by name."""
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        value, other = value.cpu(), expected[name].cpu()
        if tolerance:
            torch.testing.assert_close(value.clone(), other, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, other), f"{name}: {(value - other).abs().max()}"


class MasterAdamW:
    """The oracle for bfloat16: AdamW on float32 masters, rounded halves away from zero."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, **{**ADAMW, "foreach": False, **options})

    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, master in zip(self.params, self.masters, strict=True):
            bits = (master.detach().view(torch.int32).to(torch.int64) + 0x8000) >> 16
            p.data.copy_(bits.to(torch.int16).view(torch.bfloat16))

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None
