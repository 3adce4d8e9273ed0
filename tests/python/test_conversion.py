"""Models whose files name and cut their tensors otherwise than their modules: read and written."""

import json
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import load_file, save_file
from small_models import adamw
from strata._storage import conversion, weights
from strata._storage.stored import persistent_buffers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# Sizes by all the names that families of models give them.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "decoder_sparse_step": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
# Experts that are fused, in one tensor or two; prefixes that change; names that change.
FAMILIES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("granitemoe", "phimoe", "minimax", "jamba", "ernie4_5_moe", "hunyuan_v1_moe", "flex_olmo"),
    *("longcat_flash", "dots1", "minimax_m2", "olmo_hybrid", "hy_v3", "mimo_v2_flash"),
]


def family(kind: str) -> Any:
    """Builds a tiny model of the family, the same each time it is called."""

    def build() -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
        with torch.no_grad():
            for parameter in model.parameters():  # many begin as ones or zeros
                parameter.normal_()
        return model

    return build


def gemma() -> Any:
    """Whose language model files call otherwise, inside of a model for pictures."""
    text = {**SIZES, "sliding_window": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def mixtral(**more: Any) -> Any:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, **more}))


BUILDS = {kind: family(kind) for kind in FAMILIES} | {"gemma3": gemma}


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return type(made := build())(made.config)


def read(model: Any, path: Path) -> dict[str, torch.Tensor]:
    written: dict[str, torch.Tensor] = {}
    weights.load(model, lambda name, value: written.update({name: value.clone()}), weights=path)
    return written


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", BUILDS)
def test_files_are_read_as_by_from_pretrained(kind: str, tmp_path: Path) -> None:
    plain = BUILDS[kind]()
    plain.save_pretrained(tmp_path / "plain")
    loaded = type(plain).from_pretrained(tmp_path / "plain")
    model = on_meta(BUILDS[kind])
    values = read(model, tmp_path / "plain")
    assert same(values, {name: p.detach() for name, p in loaded.named_parameters()})
    assert len(model._weight_conversions) == len(loaded._weight_conversions)
    # And back.
    tensors = dict(loaded.named_parameters()) | persistent_buffers(loaded)
    back = conversion.as_in_files(model, tensors)
    assert same({n: t.detach().clone() for n, t in back.items()}, contents(tmp_path / "plain"))
    # The form of the modules is read as well.
    plain.save_pretrained(tmp_path / "modules", save_original_format=False)
    assert same(read(on_meta(BUILDS[kind]), tmp_path / "modules"), values)


def test_every_family_has_a_mapping() -> None:
    assert all(get_checkpoint_conversion_mapping(kind) for kind in FAMILIES)


@pytest.mark.parametrize("make", [family("mixtral"), family("qwen3_moe"), gemma])
def test_a_model_in_pages_is_exported_as_the_plain_one_is_saved(
    core: ModuleType, make: Any, tmp_path: Path
) -> None:
    plain = make()
    plain.save_pretrained(tmp_path / "plain")
    model = on_meta(make)
    model, _ = strata.wrap(
        model, adamw(model), weights=tmp_path / "plain", memory=ROOMY, page_size="64KiB",
        activations=None,
    )  # fmt: skip
    strata.export_safetensors(model, tmp_path / "exported", shard_bytes=20_000)
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    strata.save(model, tmp_path / "checkpoint")
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    for name in ("exported", "saved", "shards"):
        assert same(contents(tmp_path / name), contents(tmp_path / "plain"))
        again = type(plain).from_pretrained(tmp_path / name)
        assert same(again.state_dict(), plain.state_dict())
    assert index["weight_map"].keys() == contents(tmp_path / "plain").keys()
    file = "model.safetensors"
    assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


ROOMY = {"device": "8MiB", "host": "64MiB"}


def test_one_group_of_experts_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = mixtral(num_hidden_layers=6, num_local_experts=8, num_experts=8)
    made.save_pretrained(tmp_path / "plain")
    alive: list[int] = []
    parts: list[weakref.ref[torch.Tensor]] = []

    def watched(self: weights.WeightFiles, name: str) -> torch.Tensor:
        value = plain_read(self, name)
        parts.append(weakref.ref(value))
        alive.append(sum(part() is not None for part in parts))
        return value

    plain_read = weights.WeightFiles.read
    monkeypatch.setattr(weights.WeightFiles, "read", watched)
    with torch.device("meta"):
        model = MixtralForCausalLM(made.config)
    weights.load(model, lambda name, value: None, weights=tmp_path / "plain")
    monkeypatch.undo()
    assert len(alive) > 140
    assert max(alive) <= 2 * 8 + 1  # gate and up of eight experts, and what came before

    with torch.device("meta"):
        model = MixtralForCausalLM(made.config)
    model, _ = strata.wrap(
        model, adamw(model), weights=tmp_path / "plain", memory=ROOMY, page_size="64KiB",
        activations=None,
    )  # fmt: skip
    outputs: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    runs: list[str] = []

    def counted(self: conversion.Conversion, read: Any) -> dict[str, torch.Tensor]:
        made = plain_run(self, read)
        if self.transform is not None and not next(iter(made.values())).is_meta:
            runs.append(self.target)
            outputs.extend(weakref.ref(value) for value in made.values())
            held.append(sum(value.nbytes for one in outputs if (value := one()) is not None))
        return made

    plain_run = conversion.Conversion.run
    monkeypatch.setattr(conversion.Conversion, "run", counted)
    model.save_pretrained(tmp_path / "saved")
    monkeypatch.undo()
    assert len(runs) == len(set(runs)) == 12  # each once
    layer = 8 * 3 * 32 * 48 * 4
    assert max(held) <= layer  # of six
    assert same(contents(tmp_path / "saved"), contents(tmp_path / "plain"))


# What does not fit ----------------------------------------------------------------------------


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def changed(tmp_path: Path, change: Any) -> str:
    torch.manual_seed(0)
    build = mixtral
    build().save_pretrained(tmp_path)
    tensors = contents(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit the model") as error:
        read(on_meta(build), tmp_path)
    return str(error.value)


def test_what_does_not_fit_is_told_in_names_of_the_files(tmp_path: Path) -> None:
    def remove(tensors: Any) -> None:
        del tensors[EXPERT]

    assert f"missing: {EXPERT!r} (48, 32)" in changed(tmp_path, remove)

    def remove_all(tensors: Any) -> None:
        for name in [n for n in tensors if "layers.1.block_sparse_moe.experts" in n]:
            del tensors[name]

    said = changed(tmp_path, remove_all)
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight' (48, 32)" in said

    def widen(tensors: Any) -> None:
        tensors[EXPERT] = torch.zeros(48, 33)

    assert f"{EXPERT!r} is (48, 33), and (48, 32) is needed" in changed(tmp_path, widen)

    def add(tensors: Any) -> None:
        tensors["model.layers.7.block_sparse_moe.experts.0.w1.weight"] = torch.zeros(48, 32)

    said = changed(tmp_path, add)
    assert "not in the model: 'model.layers.7.block_sparse_moe.experts.0.w1.weight'" in said

    def add_expert(tensors: Any) -> None:
        for w, shape in (("w1", (48, 32)), ("w2", (32, 48)), ("w3", (48, 32))):
            name = f"model.layers.0.block_sparse_moe.experts.4.{w}.weight"
            tensors[name] = torch.zeros(shape)

    said = changed(tmp_path, add_expert)
    assert "not in the model: 'model.layers.0.block_sparse_moe.experts.4.w1.weight'" in said
