"""Exports of a base with the adapters of PEFT merged into it."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from adapters import EXPERTS, KINDS, logits, mixtral
from peft import (
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from strata._storage import merged
from toys import MEMORY, llama, some, wrapped
from transformers import AutoModelForCausalLM

MERGED: dict[str, tuple[Any, Any]] = {
    **{kind: (llama, config) for kind, config in KINDS.items()},
    "all layers": (llama, LoraConfig(r=4, target_modules="all-linear", use_dora=True)),
    "LoHa": (llama, LoHaConfig(r=4, target_modules=["q_proj"])),
    "OFT": (llama, OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"])),
    "VeRA": (llama, VeraConfig(r=4, target_modules=["q_proj"])),
    "tokens": (llama, LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2])),
    "tied embedding": (
        lambda: llama(tie_word_embeddings=True),
        LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    ),
    "one of two tied": (
        lambda: llama(tie_word_embeddings=True),
        LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ),
    "bfloat16": (lambda: llama().to(torch.bfloat16), KINDS["DoRA"]),
    "experts": (mixtral, EXPERTS),
}


def changed(kind: str, **more: Any) -> Any:
    """A wrapped model whose adapters do something."""
    make, config = MERGED[kind]
    model: Any = get_peft_model(make(), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return strata.wrap(model, optimizer, memory=MEMORY, **more)[0]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:.*tied")
@pytest.mark.parametrize("kind", some(MERGED, "LoRA", "DoRA", "rsLoRA"))
def test_a_merged_export_has_the_bits_of_peft(tmp_path: Path, kind: str) -> None:
    model = changed(kind)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    strata.export_safetensors(model, tmp_path / "strata", merge=True, shard_bytes=16_000)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    plain = strata.unwrap(model).merge_and_unload()
    plain.save_pretrained(tmp_path / "plain")
    files = [
        {k: v for f in (tmp_path / w).glob("*.safetensors") for k, v in load_file(f).items()}
        for w in ("plain", "strata")
    ]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[1][name], tensor) for name, tensor in files[0].items())
    assert len(list((tmp_path / "strata").glob("*.safetensors"))) > 1
    again, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / w) for w in ("strata", "plain")
    )
    assert torch.equal(logits(again), logits(expected))
    assert again.config.tie_word_embeddings == expected.config.tie_word_embeddings


def test_adapters_that_transformers_added_and_layers_in_tiles_are_merged(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    contents = []
    for way in ("plain", "transformers", "tiles"):
        model: Any = llama()
        torch.manual_seed(1)
        if way == "transformers":
            model.add_adapter(config)
        else:
            model = get_peft_model(model, config)
        if way == "tiles":
            strata.nn.tile(model, "base_model.model.lm_head.base_layer", 4)
        model = strata.wrap(model, torch.optim.AdamW(model.parameters()), memory=MEMORY)[0]
        strata.export_safetensors(model, tmp_path / way, merge=True)
        contents.append(load_file(tmp_path / way / "model.safetensors"))
        if way == "plain":
            strata.unwrap(model).merge_and_unload().save_pretrained(tmp_path / "peft")
            contents.append(load_file(tmp_path / "peft" / "model.safetensors"))
    for other in contents[1:]:
        assert other.keys() == contents[0].keys()
        assert all(torch.equal(other[name], value) for name, value in contents[0].items())


def test_a_merged_export_may_be_of_another_dtype(tmp_path: Path) -> None:
    model = changed("LoRA", dtype=torch.bfloat16)
    strata.export_safetensors(model, tmp_path / "half", merge=True)
    strata.export_safetensors(model, tmp_path / "full", merge=True, dtype=torch.float32)
    half, full = (load_file(tmp_path / w / "model.safetensors") for w in ("half", "full"))
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert {t.dtype for t in full.values()} == {torch.float32}
    for name, tensor in full.items():
        torch.testing.assert_close(half[name].float(), tensor, rtol=2e-2, atol=1e-3)


def test_one_layer_is_merged_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    run = merged._Layer.run

    def counted(layer: Any, read: Any) -> dict[str, torch.Tensor]:
        made = run(layer, read)
        outputs.extend(weakref.ref(value) for value in made.values())
        alive.append(sum(one() is not None for one in outputs))
        return made

    model = changed("all layers")
    monkeypatch.setattr(merged._Layer, "run", counted)
    strata.export_safetensors(model, tmp_path, merge=True)
    assert len(alive) == 3 * 7
    assert max(alive) <= 2  # the last one, and the next


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    model, _ = wrapped(model := llama(), torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="no adapters of PEFT to merge"):
        strata.export_safetensors(model, tmp_path, merge=True)
    prompt = get_peft_model(
        llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    trained = [p for p in prompt.parameters() if p.requires_grad]
    model, _ = wrapped(prompt, torch.optim.AdamW(trained))
    with pytest.raises(ValueError, match=r"PROMPT_TUNING.*without merge=True"):
        strata.export_safetensors(model, tmp_path, merge=True)
    assert not list(tmp_path.iterdir())
