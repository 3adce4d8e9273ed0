"""Adapters of PEFT over a wrapped model: trained, saved, filled, switched off, exported."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from adapters import EXPERTS, KINDS, TOKENS, logits, mixtral
from peft import (
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from strata._storage import weights
from toys import MEMORY, SMALL, llama, over_strata, rows, same, some, wrapped
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
)

ROOM = {**SMALL, "device": "448KiB"}  # a page of adapters beside the block that computes


def adapted(kind: str = "LoRA") -> PeftModel:
    base = llama()
    torch.manual_seed(1)
    return get_peft_model(base, KINDS[kind])


def with_optimizer(model: Any, **keywords: Any) -> Any:
    """Wrapped, where there are keywords."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return strata.wrap(model, optimizer, **keywords) if keywords else (model, optimizer)


def trained(over: bool, kind: str = "LoRA") -> tuple[Any, list[float]]:
    keywords = {"memory": ROOM} if over else {}
    model, optimizer = with_optimizer(adapted(kind), **keywords)
    return model, train(model, optimizer)


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", some(KINDS, "LoRA"))
def test_adapters_are_trained_and_saved(tmp_path: Path, kind: str) -> None:
    (plain, one), (model, other) = (trained(over, kind) for over in (False, True))
    assert same(one, other, 1e-5)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "strata")
    names = [{p.name for p in (tmp_path / w).iterdir()} for w in ("plain", "strata")]
    assert names[0] == names[1]
    files = [load_file(tmp_path / w / "adapter_model.safetensors") for w in ("plain", "strata")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=1e-3, atol=1e-5)
    back = PeftModel.from_pretrained(llama(), tmp_path / "strata")
    torch.testing.assert_close(logits(back), logits(model))


@pytest.mark.representative
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers_takes_the_pages_of_one_block(reentrant: bool) -> None:
    """The frozen layers beside adapters whose gradients are there make way for the next block."""
    losses = []
    room = {**SMALL, "device": "192KiB"}  # a page of a block, one of adapters, one that is shared
    for keywords in ({}, {"memory": room, "activations": None, "page_size": "64KiB"}):
        model: Any = adapted()
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        losses.append(train(*with_optimizer(model, **keywords)))
    assert same(*losses, 1e-5)


@pytest.mark.parametrize("form", ["nf4", "nf4-double"])
@pytest.mark.parametrize("kind", some(KINDS, "LoRA"))
def test_adapters_over_codes_train_as_over_their_values(kind: str, form: str) -> None:
    model, optimizer = with_optimizer(adapted(kind), memory=MEMORY, frozen=form)
    plain = adapted(kind)
    coded = 0
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            if one.requires_grad:
                continue
            coded += not torch.equal(one, other)
            one.copy_(other)
    assert coded > 0
    assert same(train(*with_optimizer(plain)), train(model, optimizer), 1e-5)


def test_an_adapter_that_was_there_is_filled_and_a_new_one_refused(tmp_path: Path) -> None:
    plain, _ = trained(False)
    plain.save_pretrained(tmp_path)
    model = adapted()
    model, _ = wrapped(model, torch.optim.AdamW(model.parameters()))
    model.load_adapter(tmp_path, "default", is_trainable=True)
    assert torch.equal(logits(model), logits(plain))
    for add in (
        lambda: model.load_adapter(tmp_path, "second"),
        lambda: model.add_adapter("third", KINDS["LoRA"]),
    ):
        with pytest.raises(RuntimeError, match=r"ahead of strata.wrap\(\)"):
            add()
    assert torch.equal(logits(model), logits(plain))
    assert list(model.peft_config) == ["default"]


def test_adapters_are_switched_off_and_merged() -> None:
    (plain, _), (model, _) = trained(False), trained(True)
    with plain.disable_adapter(), model.disable_adapter():
        assert torch.equal(logits(plain), logits(model))
    for change in ("merge_adapter", "unmerge_adapter"):
        for one in (plain, model):
            getattr(one, change)()
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), logits(plain.merge_and_unload()))


def test_an_export_is_adapter_files(tmp_path: Path) -> None:
    model, _ = trained(True)
    strata.export_safetensors(model, tmp_path / "adapter")
    back = PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    torch.testing.assert_close(logits(back), logits(model))
    expected = logits(model)
    plain = strata.unwrap(model).merge_and_unload()
    plain.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)


# A model without values -----------------------------------------------------------------------


FIRST = KINDS | {
    "all layers": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "gaussian": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"),
    "ranks": LoraConfig(
        r=4, target_modules=["v_proj"], rank_pattern={"layers.1.self_attn.v_proj": 2}
    ),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "LoHa": LoHaConfig(r=4, target_modules=["q_proj"]),
    "OFT": OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]),
}


def read(model: Any, path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    written: dict[str, torch.Tensor] = {}

    def write(name: str, value: torch.Tensor) -> None:
        assert name not in written
        written[name] = value.clone()

    weights.load(model, write, weights=path, seed=seed)
    return written


@pytest.mark.parametrize("kind", some(FIRST, "LoRA", "all layers", "modules to save"))
def test_the_base_is_read_and_adapters_begin_as_in_peft(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    base = llama()
    base.save_pretrained(tmp_path)
    expected = dict(get_peft_model(base, FIRST[kind]).named_parameters())
    config = FIRST[kind]
    model = get_peft_model(llama(meta=True), config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT has said what there is to say
        values = read(model, tmp_path)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert values[name].shape == value.shape
        drawn = value.unique().numel() > value.numel() // 2 and "magnitude" not in name
        if drawn and any(part in name for part in ("lora_", "hada_")):
            assert 0.4 < values[name].std() / value.detach().std() < 2.5
            continue
        assert torch.equal(values[name], value), name
    again = read(get_peft_model(llama(meta=True), config), tmp_path)
    assert all(torch.equal(again[name], value) for name, value in values.items())


def test_fused_experts_are_read_beside_their_adapters(tmp_path: Path) -> None:
    base = mixtral()
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = mixtral()
    values = read(get_peft_model(empty, EXPERTS), tmp_path)
    expected = dict(get_peft_model(base, EXPERTS).named_parameters())
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value) or "lora_A" in name


@pytest.mark.parametrize("outside", [True, False])
def test_a_model_without_values_trains_with_adapters(tmp_path: Path, outside: bool) -> None:
    """Around the model by PEFT, or put in by Transformers."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    trained_on: list[list[float]] = []
    for source in (tmp_path / "base", "init"):
        model: Any = llama(meta=True)
        if outside:
            model = get_peft_model(model, KINDS["LoRA"])
        else:
            model.add_adapter(KINDS["LoRA"])
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        model, optimizer = wrapped(model, optimizer, weights=source)
        before = logits(model)
        if source != "init":
            assert torch.equal(before, logits(base))
        losses = []
        for _ in range(3):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        trained_on.append(losses)
    assert not same(trained_on[0], trained_on[1], 1e-5)


def test_what_peft_cannot_begin_with_one_layer_is_named(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    vera = VeraConfig(r=4, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"'default' of .*layers.0.self_attn.q_proj.*on the CPU"):
        read(get_peft_model(llama(meta=True), vera), tmp_path)
    tokens = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with pytest.raises(ValueError, match=r"embed_tokens.*build the base model on the CPU"):
        read(get_peft_model(llama(meta=True), tokens), tmp_path)


def test_files_that_do_not_fit_are_told_in_names_of_the_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: 'model.layers.0.self_attn.q_proj.weight'"):
        read(get_peft_model(llama(meta=True), KINDS["LoRA"]), tmp_path)


def test_trainers_go_on_with_adapters(tmp_path: Path) -> None:
    def run(trainer: Any, name: str, resume: bool = False) -> list[float]:
        args = TrainingArguments(
            output_dir=str(tmp_path / name), per_device_train_batch_size=2, max_steps=4,
            logging_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        made = trainer(model=adapted(), args=args, train_dataset=rows(16))
        made.train(str(tmp_path / name / "checkpoint-2") if resume else None)
        return [row["loss"] for row in made.state.log_history if "loss" in row]

    mixed = over_strata(Trainer, memory=SMALL)
    losses = run(mixed, "strata")
    assert same(losses, run(Trainer, "plain"), 1e-5)
    assert (tmp_path / "strata" / "checkpoint-4" / "adapter_model.safetensors").exists()
    assert run(mixed, "strata", resume=True) == losses
