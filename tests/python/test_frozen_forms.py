"""What the keyword `frozen` means: which parameters rest as codes, which stay as they are, and what
is refused by name."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from strata import StrataError
from strata._config.frozen import stored_forms
from strata._runtime.wrapped import wrapped
from test_frozen import ROOMY, batches, freeze, llama, train, wrap
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

BLOCK_OF_LLAMA = 7  # weights of linear layers


def small(**more: Any) -> nn.Module:
    """Of one block."""
    config = llama().config
    config.update({"num_hidden_layers": 1, **more})
    return LlamaForCausalLM(config)


def lora(model: nn.Module, **more: Any) -> nn.Module:
    settings = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **more}
    return get_peft_model(model, LoraConfig(**settings))


def forms_of(model: nn.Module, frozen: Any = "nf4") -> dict[str, Any]:
    return dict(stored_forms(model, lambda p: p.requires_grad, frozen))


def stored(model: nn.Module) -> dict[str, Any]:
    """Of a wrapped model."""
    return {s["name"]: s["stored"] for s in wrapped(model).config["params"] if "stored" in s}


def all_frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def test_an_adapter_that_is_not_used_keeps_its_values(tmp_path: Path) -> None:
    """A second one, or the reference of DPO, has no gradients, and is no part of the base."""
    model = lora(small())
    model.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if ".other." in n}
    assert len(before) == 2
    model, _ = wrap(model, dtype=torch.float32)
    assert not any("lora_" in name for name in stored(model))
    assert len(stored(model)) == BLOCK_OF_LLAMA
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "other" / "adapter_model.safetensors")
    assert len(saved) == 2
    for name, value in saved.items():
        assert torch.equal(value, before[name.replace(".weight", ".other.weight")]), name


def test_a_copy_of_an_adapter_that_is_not_used_keeps_its_values() -> None:
    both = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}
    model = get_peft_model(small(), LoraConfig(**both))
    model.add_adapter("other", LoraConfig(**both))
    assert any("modules_to_save.other" in name for name, _ in model.named_parameters())
    assert not any("modules_to_save" in name for name in forms_of(model))
    assert any("up_proj.original_module" in name for name in forms_of(model))


def cut(model: nn.Module) -> nn.Module:
    for name in ("lm_head", "model.embed_tokens"):
        strata.nn.tile(model, f"base_model.model.{name}", 4)
    return model


class Holder(nn.Module):
    """A model within another, as in recipes that have two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = small()


HEADS: list[tuple[str, Callable[[], nn.Module]]] = [
    ("plain", lambda: lora(small())),
    ("adapter", lambda: lora(small(), target_modules=["q_proj", "lm_head"])),
    ("copy", lambda: lora(small(), modules_to_save=["lm_head"])),
    ("tiles", lambda: cut(lora(small()))),
    ("tied", lambda: lora(small(tie_word_embeddings=True))),
    ("within", lambda: all_frozen(Holder())),
]


@pytest.mark.parametrize("make", [m for _, m in HEADS], ids=[name for name, _ in HEADS])
def test_embeddings_and_the_output_layer_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    forms = forms_of(make())
    assert len(forms) == BLOCK_OF_LLAMA
    assert all("_proj" in name for name in forms), sorted(forms)


def test_a_budget_that_cuts_layers_changes_no_form() -> None:
    """Tiles of the head are the head's, and of the embedding the embedding's."""
    for frozen in ("nf4", lambda name, _: "int8" if name.endswith("lm_head") else None):
        found = []
        for device in ("64MiB", "1536KiB"):
            # A head of 2 MiB in bfloat16.
            model = lora(small(vocab_size=8192))
            memory = {"device": device, "host": "64MiB"}
            model, _ = wrap(model, frozen, memory=memory, page_size="64KiB")
            tiled = [n for n, m in model.named_modules() if isinstance(m, strata.nn.TiledLinear)]
            assert bool(tiled) == (device != "64MiB")
            found.append(
                {name.split(".tiles.")[0].removesuffix(".weight") for name in stored(model)}
            )
            strata.unwrap(model)
        assert found[0] == found[1]
        assert found[0]


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        image_size=32, patch_size=8, num_labels=64,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64))


def classifier() -> nn.Module:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        vocab_size=64, num_labels=3,
    )  # fmt: skip
    return lora(
        BertForSequenceClassification(config), task_type="SEQ_CLS", target_modules=["query"]
    )


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=64, num_local_experts=2,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    )


class Bare(nn.Module):
    """Norms of two dimensions and an attention of PyTorch's own, whose projections are bare."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((4, 64))
        self.attention = nn.MultiheadAttention(64, 2, add_bias_kv=True)


OTHERS: list[tuple[Callable[[], nn.Module], tuple[str, ...], int]] = [
    (vit, ("projection", "_proj", "mlp.fc"), 7),
    (mamba, ("in_proj", "x_proj", "dt_proj", "out_proj", "conv1d"), 5),
    (classifier, ("query.base_layer", "key", "value", "dense"), 7),
    (mixtral, ("_proj",), 6),
    (gpt2, ("c_attn", "c_proj", "c_fc"), 4),
    (Bare, ("attention.in_proj_weight", "attention.out_proj.weight"), 2),
]


@pytest.mark.parametrize(("make", "parts", "count"), OTHERS)
def test_a_form_for_all_means_weights_of_layers(
    make: Callable[[], nn.Module], parts: tuple[str, ...], count: int
) -> None:
    """No tokens of classes or positions, no A_log, no router, no norm, and no classifier."""
    forms = forms_of(all_frozen(make()))
    assert len(forms) == count, sorted(forms)
    assert all(any(part in name for part in parts) for name in forms), sorted(forms)


def test_int8_has_a_scale_for_each_row_of_an_expert() -> None:
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():  # one row is large, and must not make the others coarse
        experts.gate_up_proj[0, 0] = 100.0
        experts.down_proj[1, 5] = 100.0
    before = {name: p.detach().clone() for name, p in experts.named_parameters()}
    model, _ = wrap(freeze(model), "int8", dtype=torch.float32)
    for name, expected in before.items():
        assert stored(model)[f"model.layers.0.mlp.experts.{name}"] == "int8"
        value = getattr(experts, name) + 0
        steps = expected.abs().amax(-1, keepdim=True) / 127
        assert ((value - expected).abs() <= 0.51 * steps).all(), name


def test_rows_of_experts_that_make_no_blocks_are_refused() -> None:
    """2 x 32 elements of an expert are a block, and rows of 32 are none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(4, 2, 32), requires_grad=False)

    model = nn.Sequential(Experts())
    assert forms_of(model) == {"0.down_proj": "nf4"}
    with pytest.raises(ValueError, match=r"rows of '0.down_proj', of shape \(4, 2, 32\)"):
        forms_of(model, "int8")


def test_int8_of_convolutions_has_a_scale_for_each_output() -> None:
    model = all_frozen(nn.Sequential(nn.Conv1d(16, 8, 4, bias=False), nn.Linear(64, 64)))
    assert forms_of(model, "int8") == {"0.weight": "int8", "1.weight": "int8"}


def test_a_form_that_would_store_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no frozen weight of a layer .* freeze the base"):
        wrap(llama())


def test_a_function_may_name_norms() -> None:
    """Also where nothing else of them is of more dimensions."""

    def norms(name: str, module: nn.Module) -> str | None:
        return "int8" if name.endswith("layernorm") else None

    model = lora(llama())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
    norm = model.base_model.model.model.layers[1].input_layernorm
    before = norm.weight.detach().clone()
    model, optimizer = wrap(model, norms, dtype=torch.float32)
    assert len(stored(model)) == 3 * 2
    value = norm.weight + 0
    assert not torch.equal(value, before)
    assert (value - before).abs().max() <= 0.51 * before.max() / 127
    losses = train(model, optimizer, batches(3))
    assert losses[-1] != losses[0]


class Odd(nn.Module):
    """A norm of 48."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 64)


def test_a_norm_that_makes_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"elements of 'norm.weight', of shape \(48,\)"):
        forms_of(all_frozen(Odd()), lambda name, _: "nf4" if name == "norm" else None)


def test_biases_stay_whatever_a_function_says() -> None:
    model = all_frozen(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)))
    assert forms_of(model, lambda *_: "nf4") == {"0.weight": "nf4", "1.weight": "nf4"}


def test_what_wants_gradients_but_has_no_optimizer_is_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def pair() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model[2].parameters(), lr=0.1)

    caplog.set_level(logging.INFO, "strata")
    model, _ = strata.wrap(*pair(), memory=ROOMY, frozen="nf4")
    assert stored(model) == {"0.weight": "nf4"}
    told = [r.getMessage() for r in caplog.records if "require gradients" in r.getMessage()]
    assert len(told) == 1
    assert "'nf4'" in told[0]
    assert "1.weight;" in told[0]

    def second(name: str, module: nn.Module) -> str | None:
        return "nf4" if name == "1" else None

    with pytest.raises(ValueError, match=r"'1.weight' as nf4, and it requires a gradient"):
        strata.wrap(*pair(), memory=ROOMY, frozen=second)
    # Where that is all there is, it is told why.
    model, optimizer = pair()
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"no frozen weight .*0\.weight, 1\.weight: not in the op"):
        strata.wrap(model, optimizer, memory=ROOMY, frozen="nf4")


def test_a_refusal_says_why_tiles_cannot_be() -> None:
    """Rows of 1,000 elements: only 8 of them make whole blocks."""
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 16))
    model[0].requires_grad_(False)
    weight = model[0].weight
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    memory = {"device": "2MiB", "host": "64MiB"}
    with pytest.raises(StrataError, match=r"tiles either: .*'0\.tiles\.\d+\.weight'") as caught:
        strata.wrap(model, optimizer, memory=memory, frozen="nf4", page_size="64KiB")
    assert "blocks of 64" in str(caught.value)
    assert caught.value.needed_bytes > 0  # what the first refusal knows
    assert model[0].weight is weight  # the model is as it was
