"""Models built on the meta device get the values that a model built in memory would have."""

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from strata._storage import initialise, weights
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)


def llama_config(**more: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more,
    )  # fmt: skip


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config())


def tied_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config(tie_word_embeddings=True))


def yarn_llama() -> LlamaForCausalLM:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaForCausalLM(llama_config(rope_parameters=rope))


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


FAMILIES = [llama, tied_llama, yarn_llama, gpt2, t5]
Build = Callable[[], nn.Module]


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build().eval()


def filled(model: nn.Module, **how: object) -> dict[str, torch.Tensor]:
    """Loads into `model` as a user of `weights.load` does, and returns what was written."""
    written: dict[str, torch.Tensor] = {}

    def write(name: str, value: torch.Tensor) -> None:
        assert name not in written
        assert value.dtype == torch.float32
        assert value.is_contiguous()
        assert not value.is_meta
        written[name] = value.clone()

    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    weights.load(model, write, **how)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert set(written) == set(before)
    return written


def real(model: nn.Module, written: dict[str, torch.Tensor]) -> nn.Module:
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first = next(n for n, p in model.named_parameters() if p is parameter)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).__dict__.setdefault("_new", {})[leaf] = written[first]
    for module in model.modules():
        for leaf, value in module.__dict__.pop("_new", {}).items():
            module._parameters[leaf] = nn.Parameter(value)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % 128
    inputs = {"input_ids": tokens}
    if hasattr(model, "encoder"):
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("build", FAMILIES)
@pytest.mark.parametrize("shards", ["one file", "many"])
def test_logits_of_saved_weights_are_bitwise_equal(
    build: Build, shards: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    source = build().eval()
    source.save_pretrained(tmp_path, max_shard_size="40KB" if shards == "many" else "5GB")
    assert (tmp_path / weights.INDEX_NAME).exists() == (shards == "many")
    model = on_meta(build)
    assert torch.equal(
        logits(real(model, filled(model, weights=tmp_path))),
        logits(type(source).from_pretrained(tmp_path)),
    )


@pytest.mark.parametrize("build", FAMILIES)
def test_own_initialisers_give_the_usual_statistics(build: Build) -> None:
    torch.manual_seed(2)
    usual = dict(build().named_parameters())
    model = on_meta(build)
    written = filled(model, seed=7)
    for name, expected in usual.items():
        value = written[name]
        assert value.shape == expected.shape
        spread = expected.std().item()
        # The standard deviation of n normal values is itself off by about 1/sqrt(2n).
        slack = 6 / math.sqrt(2 * value.numel())
        assert value.std().item() == pytest.approx(spread, rel=slack), name
        assert value.mean().item() == pytest.approx(expected.mean().item(), abs=6 * spread * slack)
    assert torch.isfinite(logits(real(model, written))).all()


def test_initial_values_depend_on_the_seed_and_the_name_alone() -> None:
    once, again, other = (filled(on_meta(llama), seed=s) for s in (3, 3, 4))
    assert all(torch.equal(once[name], again[name]) for name in once)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(once[name], other[name])
    assert not torch.equal(once[name], once["model.layers.1.mlp.up_proj.weight"])
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    assert torch.equal(filled(on_meta(llama), seed=3)[name], once[name])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_another_device_draws_the_values_that_the_host_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that is none: it says what is asked of it, and the host does that."""
    full, fork = torch.full, torch.random.fork_rng
    asked: list[object] = []

    def full_of(*args: object, device: object, **how: object) -> torch.Tensor:
        asked.append(device)
        return full(*args, device="cpu", **how)

    def fork_of(devices: list[torch.device], **_: object) -> object:
        asked.append(devices)
        return fork([])

    monkeypatch.setattr(torch, "full", full_of)
    monkeypatch.setattr(torch.random, "fork_rng", fork_of)
    linear = on_meta(lambda: nn.Linear(4, 4))
    values = initialise.parameters(linear, "", 3, "cuda:0")
    assert asked.count("cuda:0") == 2
    assert [torch.device("cuda:0")] in asked
    assert all(value.device.type == "cpu" for value in values.values())
    expected = initialise.parameters(linear, "", 3)
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("source", ["files", "initialisers"])
def test_one_module_at_a_time_is_in_memory(source: str, tmp_path: Path) -> None:
    if source == "files":
        llama().to(torch.bfloat16).save_pretrained(tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []

    def write(name: str, value: torch.Tensor) -> None:
        assert [ref for ref in alive if ref() is not None] == [], name
        alive.append(weakref.ref(value))

    weights.load(on_meta(llama), write, weights=tmp_path if source == "files" else None)
    assert len(alive) == len(list(llama().parameters()))


def test_a_base_model_fits_the_model_that_wraps_it_and_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = tied_llama()
    whole.model.save_pretrained(tmp_path / "base")
    written = filled(on_meta(tied_llama), weights=tmp_path / "base")
    assert torch.equal(written["model.norm.weight"], whole.model.norm.weight)
    whole.save_pretrained(tmp_path / "whole")
    written = filled(on_meta(lambda: LlamaModel(llama_config())), weights=tmp_path / "whole")
    assert torch.equal(written["embed_tokens.weight"], whole.model.embed_tokens.weight)


def test_float16_files_are_read_as_float32(tmp_path: Path) -> None:
    source = llama().to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    written = filled(on_meta(llama), weights=tmp_path / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], source.lm_head.weight.float())


def test_a_file_that_does_not_fit_is_refused_by_name_and_shapes(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(3, 4)
    tensors["lm_head.weight"] = torch.zeros(128, 32)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="do not fit") as caught:
        weights.load(on_meta(llama), lambda name, value: None, weights=tmp_path)
    message = str(caught.value)
    assert "missing: 'model.norm.weight' (64,)" in message
    assert "'model.extra.weight' (3, 4)" in message
    assert "'lm_head.weight' is (128, 32), the model's 'lm_head.weight' is (128, 64)" in message


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    tied_llama().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    filled(on_meta(tied_llama), weights=tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(128, 64)}, file)
    with pytest.raises(ValueError, match="one tied parameter"):
        filled(on_meta(tied_llama), weights=tmp_path)


def test_broken_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        weights.WeightFiles(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors file"):
        weights.WeightFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        weights.WeightFiles(tmp_path)
    index = {"weight_map": {"a": "gone.safetensors"}}
    (tmp_path / weights.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        weights.WeightFiles(tmp_path)


class Rotary(nn.Module):
    """Keeps its arguments, so its buffers can be computed again."""

    def __init__(self, dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.register_buffer("angles", base ** torch.arange(dim).float(), persistent=False)
        self.mask = torch.arange(dim)


class Forgetful(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(dim).float(), persistent=False)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def test_buffers_of_plain_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(4, 10.0), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    filled(model)
    assert torch.equal(model[0].angles, torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    assert torch.equal(model[0].mask, torch.arange(4))
    assert torch.equal(model[2].running_var, torch.ones(4))
    assert model[2].num_batches_tracked.item() == 0


def test_persistent_buffers_come_from_the_file(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    source(torch.randn(2, 3, 8, 8))
    save_file(source.state_dict(), tmp_path / "some.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    filled(model, weights=tmp_path)
    assert torch.equal(model[1].running_mean, source[1].running_mean)
    assert model[1].num_batches_tracked.item() == 1


def test_what_cannot_be_computed_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Forgetful(4))
    with pytest.raises(ValueError, match=r"0\.angles.*Forgetful"):
        weights.load(model, lambda name, value: None)
    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(ValueError, match=r"'0\.gain' of Bare"):
        weights.load(model, lambda name, value: None)
