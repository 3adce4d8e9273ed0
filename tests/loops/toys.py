"""Small models, text and tokenizers for the loops, all made here, and the budgets they get."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MEMORY = {"device": "24MiB", "host": "64MiB"}
SMALL = {"device": "400KiB", "host": "16MiB"}  # where losses are computed in the model
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
VOCABULARY = 64


def config(**more: Any) -> LlamaConfig:
    """Of a Llama that is trained in milliseconds."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, **more,
    )  # fmt: skip


def llama(meta: bool = False, **more: Any) -> LlamaForCausalLM:
    """The same values each time; none on the meta device."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return LlamaForCausalLM(config(**more))


def tokenizer() -> PreTrainedTokenizerFast:
    """One letter, one token."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def folder_of_model(path: Path, model: Any = None) -> Path:
    """Model and tokenizer as from_pretrained() reads them."""
    (model or llama()).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def rows(count: int = 64, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Tokens drawn from seeds, as a data set for a causal model."""
    drawn = [
        torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i))
        for i in range(count)
    ]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def some(names: Iterable[str], *chosen: str) -> list[Any]:
    """Parameters of a test, of which the chosen ones run in every run of the tests."""
    marks = {True: [pytest.mark.representative], False: []}
    return [pytest.param(name, marks=marks[name in chosen]) for name in names]


def same(left: Any, right: Any, within: float = 1e-6) -> bool:
    """Whether two lists of losses are."""
    return len(left) == len(right) and torch.allclose(
        torch.tensor(left), torch.tensor(right), rtol=within, atol=within
    )


def wrapped(model: Any, optimizer: Any, **more: Any) -> Any:
    """strata.wrap in little memory."""
    return strata.wrap(model, optimizer, memory=SMALL, **more)


def over_strata(trainer: Callable[..., Any], **keywords: Any) -> Any:
    """A class of trainers with the mixin, for programs that make one themselves."""
    from strata.integrations.transformers import TrainerMixin

    class OverStrata(TrainerMixin, trainer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, strata={"memory": MEMORY, **keywords}, **kwargs)

    return OverStrata
