"""Llamas to measure with, and tokens to feed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from .paper import LlamaSizes

VOCABULARY = 8192


def llama_config(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> LlamaConfig:
    """A Llama with heads of 64, a feed-forward of 21/8 of the width and an untied head."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 21 // 8,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
    )


def config_of(sizes: LlamaSizes, sequence: int) -> LlamaConfig:
    """A Llama of these sizes, for sequences of that length; its head is untied."""
    return LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )


def with_adapters(model: nn.Module, rank: int = 8) -> Any:
    """LoRA beside every linear layer of the blocks; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def parameter_count(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> int:
    """Parameters of llama_config(...), without building it."""
    block = 4 * hidden * hidden + 3 * hidden * (hidden * 21 // 8) + 2 * hidden
    return layers * block + 2 * vocabulary * hidden + hidden


def llama(config: LlamaConfig, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model in training mode, the same for the same seed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype)
    return model.train()


def llama_166m(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model of the step bench: 166.2 M parameters."""
    return llama(llama_config(1024, 12), dtype, seed)


def llama_166m_or_small(quick: bool, seed: int, small: tuple[int, int] = (128, 2)) -> nn.Module:
    """llama_166m(), or where it shall be quick a Llama of so much width and so many layers."""
    return llama(llama_config(*small), torch.bfloat16, seed) if quick else llama_166m(seed)


def tokens(count: int, seed: int, vocabulary: int = VOCABULARY, sequences: int = 1) -> torch.Tensor:
    """A batch of random tokens: `count` of them in sequences of equal length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (sequences, count // sequences), generator=generator)
