"""LoRA by PEFT over a wrapped model: trained, saved, filled, merged, exported."""

from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from strata.integrations.transformers import give_adapters_values
from toys import SMALL, folder_of_model, llama, over_strata, rows, same, some, wrapped
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

TOKENS = torch.stack([row["input_ids"] for row in rows(4)])
KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "DoRA": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "rsLoRA": LoraConfig(r=4, target_modules=["o_proj"], use_rslora=True, task_type="CAUSAL_LM"),
    "modules to save": LoraConfig(
        r=4, target_modules=["v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "IA3": IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
}


def adapted(kind: str = "LoRA") -> PeftModel:
    base = llama()
    torch.manual_seed(1)
    return get_peft_model(base, KINDS[kind])


def trained(over: bool, kind: str = "LoRA") -> tuple[Any, list[float]]:
    model: Any = adapted(kind)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if over:
        model, optimizer = wrapped(model, optimizer)
    losses = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits  # type: ignore[no-any-return]


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


@pytest.mark.parametrize("outside", [False, True])
def test_adapters_of_a_model_without_values_are_trained(tmp_path: Path, outside: bool) -> None:
    """Put in by Transformers, or around the model by PEFT."""

    def losses(meta: bool) -> list[float]:
        model: Any = llama(meta)
        if outside:
            model = get_peft_model(model, KINDS["LoRA"])
        else:
            model.add_adapter(KINDS["LoRA"])
        give_adapters_values(model, seed=3)
        optimizer: Any = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        )
        if meta:
            model, optimizer = wrapped(model, optimizer, weights=tmp_path)
        found = []
        for _ in range(3):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    folder_of_model(tmp_path)
    assert same(losses(False), losses(True), 1e-5)


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
