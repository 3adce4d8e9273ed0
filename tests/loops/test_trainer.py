"""Trainer of Transformers over a wrapped model, with the mixin and without: as over a plain one."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import strata
import torch
from safetensors.torch import load_file
from strata.integrations.transformers import TrainerMixin, newest_checkpoint
from toys import MEMORY, SMALL, folder_of_model, llama, rows, same, some, wrapped
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

DATA = rows()


class Mixed(TrainerMixin, Trainer):
    pass


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 8, "logging_steps": 2, "save_steps": 4,
        "eval_strategy": "steps", "eval_steps": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**given, **more})


def losses(trainer: Trainer) -> list[float]:
    history = trainer.state.log_history
    return [row.get("loss", row.get("eval_loss")) for row in history if "train_loss" not in row]


def plain(folder: Path, **more: Any) -> Trainer:
    trainer = Trainer(llama(), arguments(folder, **more), train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return trainer


def unchanged(folder: Path, **more: Any) -> Trainer:
    """The plain Trainer, which is given a wrapped model and the optimizer that came with it."""
    model = llama()
    args = arguments(folder, **more)
    model, optimizer = wrapped(model, Trainer(model, args, eval_dataset=DATA).create_optimizer())
    trainer = Trainer(
        model, args, train_dataset=DATA, eval_dataset=DATA[:8], optimizers=(optimizer, None)
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return trainer


def mixed(folder: Path, resume: Any = None, **more: Any) -> Trainer:
    trainer = mixed_trainer(folder, **more)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    return trainer


def mixed_trainer(folder: Path, model: Any = None, keywords: Any = None, **more: Any) -> Trainer:
    return Mixed(
        model or llama(),
        arguments(folder, **more),
        train_dataset=DATA,
        eval_dataset=DATA[:8],
        strata={"memory": SMALL, **(keywords or {})},
    )


WAYS: dict[str, dict[str, Any]] = {
    "default clipping": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "no clipping": {"max_grad_norm": 0.0},
    "strong clipping": {"max_grad_norm": 1e-2},
    "best model": {"load_best_model_at_end": True},
    "sgd": {"optim": "sgd"},
    "checkpointing of activations": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", some(WAYS, "accumulation"))
@pytest.mark.parametrize("train", [unchanged, mixed])
def test_training_is_that_of_the_plain_model(tmp_path: Path, train: Any, way: str) -> None:
    one = plain(tmp_path / "plain", **WAYS[way])
    other = train(tmp_path / "strata", **WAYS[way])
    assert same(losses(one), losses(other))
    norms = [[r["grad_norm"] for r in t.state.log_history if "loss" in r] for t in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for folder in ("final", "checkpoint-8"):
        names = [{p.name for p in (tmp_path / w / folder).iterdir()} for w in ("plain", "strata")]
        assert names[0] - names[1] <= {"optimizer.pt"}
        files = [
            load_file(tmp_path / w / folder / "model.safetensors") for w in ("plain", "strata")
        ]
        assert files[0].keys() == files[1].keys()
        for name, tensor in files[0].items():
            torch.testing.assert_close(files[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_16_bit_arguments_train_as_they_do_without(tmp_path: Path) -> None:
    one, other = (train(tmp_path / train.__name__, bf16=True) for train in (plain, unchanged))
    assert same(losses(one), losses(other), 1e-4)


@pytest.mark.representative
def test_a_run_that_was_cut_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = mixed(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-6").mkdir()  # cut while it was written
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    again = mixed(tmp_path, resume=True)
    assert losses(again) == losses(whole)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one.detach().clone(), other.detach().clone())
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text('{"global_st')
    with pytest.raises(ValueError, match="no complete checkpoint"):
        mixed(tmp_path, resume=str(tmp_path / "checkpoint-8"))
    with pytest.raises(ValueError, match="no complete checkpoint"):
        mixed(tmp_path / "none", resume=True)


def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tmp_path: Path) -> None:
    one = plain(tmp_path / "plain")
    other = mixed(tmp_path / "strata", resume=str(tmp_path / "plain" / "checkpoint-4"))
    assert same(losses(one), losses(other))


def test_a_model_without_values_is_read_into_pages(tmp_path: Path) -> None:
    source = folder_of_model(tmp_path / "source")
    one = mixed(tmp_path / "one")
    meta = llama(meta=True)
    trainer = mixed_trainer(tmp_path / "other", meta, {"weights": source})
    assert all(p.is_meta for p in meta.parameters()), "nothing is made before the optimizer is"
    trainer.train()
    assert losses(one) == losses(trainer)
    trainer.save_model(str(tmp_path / "out"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for p, q in zip(back.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(p, q.detach().clone())


class Asking(Trainer):
    """Computes in its constructor, as TRL's trainers do with a reference model."""

    def __init__(self, model: Any, *args: Any, **more: Any) -> None:
        super().__init__(model, *args, **more)
        with torch.no_grad():
            self.reference = model(input_ids=torch.tensor([[1, 2, 3]])).logits.mean().item()


class MixedAsking(TrainerMixin, Asking):
    pass


def test_a_constructor_that_needs_values_of_a_meta_model_names_the_way_out(tmp_path: Path) -> None:
    source = folder_of_model(tmp_path / "source")
    keywords = {"memory": MEMORY, "weights": source}
    args = arguments(tmp_path, eval_strategy="no")
    with pytest.raises(ValueError, match="wrap it before") as refused:
        MixedAsking(llama(meta=True), args, train_dataset=DATA, strata=keywords)
    assert "optimizers=(optimizer, None)" in str(refused.value)
    model = llama(meta=True)
    model, optimizer = strata.wrap(model, torch.optim.AdamW(model.parameters()), **keywords)
    trainer = MixedAsking(model, args, train_dataset=DATA, optimizers=(optimizer, None))
    assert trainer.reference == pytest.approx(Asking(llama(), args).reference, abs=1e-6)


def test_updates_that_take_gradients_as_they_come_tell_their_norm(tmp_path: Path) -> None:
    trainer = mixed_trainer(tmp_path, keywords={"update": "in_backward"}, max_grad_norm=0.0)
    trainer.train()
    expected = plain(tmp_path / "plain", max_grad_norm=0.0)
    assert same(losses(expected), losses(trainer))
    norms = [
        [r["grad_norm"] for r in t.state.log_history if "loss" in r] for t in (expected, trainer)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


SGD: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.3,
}  # whose updates are as long as gradients


@pytest.mark.parametrize(
    "update",
    [
        pytest.param("on_step", marks=pytest.mark.representative),
        strata.LockFree(max_staleness=0),
    ],
)
def test_where_wrap_clips_the_trainer_does_not(tmp_path: Path, update: Any) -> None:
    keywords = {"update": update, "max_grad_norm": 0.5}
    trainer = mixed_trainer(tmp_path, keywords=keywords, max_grad_norm=0.2, **SGD)
    trainer.train()
    expected = plain(tmp_path / "plain", max_grad_norm=0.5, **SGD)
    assert same(losses(expected), losses(trainer))
    histories = (expected.state.log_history, trainer.state.log_history)
    norms = [[row["grad_norm"] for row in history if "loss" in row] for history in histories]
    assert min(norms[0]) > 0.5
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_updates_that_begin_before_the_trainer_could_clip_do_it(tmp_path: Path) -> None:
    update = strata.LockFree(max_staleness=0)
    trainer = mixed_trainer(tmp_path, keywords={"update": update}, **SGD)
    trainer.train()
    assert same(losses(plain(tmp_path / "plain", **SGD)), losses(trainer))
    with pytest.raises(ValueError, match=r"give strata=\{'max_unit_norm': 1.0, ...\}"):
        mixed_trainer(tmp_path, keywords={"update": "in_backward"})
    by_units = {"update": "in_backward", "max_unit_norm": 1.0}
    one, other = (
        mixed_trainer(tmp_path, keywords=by_units, **more) for more in ({}, {"max_grad_norm": 0.0})
    )
    one.train()
    other.train()
    assert losses(one) == losses(other)


def test_a_checkpoint_that_is_written_again_is_not_whole_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-8"

    def killed(self: Any, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-8"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Mixed, "_save_rng_state", killed)
    with pytest.raises(KeyboardInterrupt):
        mixed(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


def test_losses_of_float16_are_scaled(tmp_path: Path) -> None:
    trainer = mixed_trainer(tmp_path, keywords={"dtype": torch.float16})
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() > 1
    expected = plain(tmp_path / "plain")
    assert same(losses(expected), losses(trainer), 1e-2)
    histories = (expected.state.log_history, trainer.state.log_history)
    norms = [[row["grad_norm"] for row in history if "loss" in row] for history in histories]
    finite = [pair for pair in zip(*norms, strict=True) if math.isfinite(pair[1])]
    assert len(finite) >= 2
    for one, other in finite:
        assert other == pytest.approx(one, rel=0.1)
    again = mixed_trainer(tmp_path, keywords={"dtype": torch.float16})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(again) == losses(trainer)


@pytest.mark.parametrize("update", some(["on_step", "in_backward"], "on_step"))
def test_a_recorded_step_without_memory_is_run_again_with_all_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    more = {"gradient_accumulation_steps": 2} if update == "on_step" else {"max_grad_norm": 0.0}
    seen: list[torch.Tensor] = []
    compute = Trainer.compute_loss

    def failing(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, model, inputs, *args, **kwargs)
        if model.training:
            seen.append(inputs["input_ids"])
            if len(seen) == 2:
                raise torch.OutOfMemoryError("no room")
        return loss

    expected = plain(tmp_path / "plain", **more)
    trainer = mixed_trainer(tmp_path, keywords={"update": update}, **more)
    monkeypatch.setattr(Mixed, "compute_loss", failing)
    if update == "in_backward":
        with pytest.raises(strata.StrataError, match="step 2 ran out of device memory: no room"):
            trainer.train()
        return
    trainer.train()
    assert [torch.equal(seen[i], seen[i + 2]) for i in (0, 1)] == [True, True]
    assert same(losses(expected), losses(trainer), 1e-4)


def test_evaluation_alone_wraps_the_model(tmp_path: Path) -> None:
    expected = Trainer(llama(), arguments(tmp_path), eval_dataset=DATA[:8]).evaluate()
    found = mixed_trainer(tmp_path).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_logs_say_where_the_run_stands(tmp_path: Path) -> None:
    trainer = mixed(tmp_path)
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert 0 < last["strata_host_gib"] <= 16 / 1024
    assert 0 < last["strata_percent_of_bound"] <= 100
    json.dumps(last)  # trackers take numbers


def test_optimizers_by_name_are_ours_or_refused(tmp_path: Path) -> None:
    trainer = mixed_trainer(tmp_path, optim="adamw_bnb_8bit")
    trainer.create_optimizer()
    config = trainer.model.__dict__["_strata"].config
    assert config["moment_dtype"] == "block8"
    trainer = mixed_trainer(tmp_path, optim="lion_32bit")
    assert type(trainer.create_optimizer()._inner) is strata.Lion
    with pytest.raises(ValueError, match="'adafactor' has no equivalent"):
        mixed_trainer(tmp_path, optim="adafactor")


@pytest.mark.parametrize("given", ["torch_compile", "auto_find_batch_size", "bf16_full_eval"])
def test_arguments_that_cannot_hold_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(ValueError, match=f"strata cannot train with {given}="):
        mixed_trainer(tmp_path, **{given: True})


def test_unknown_keywords_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'memory'"):
        Mixed(llama(), arguments(tmp_path), eval_dataset=DATA, strata={"memry": MEMORY})


def test_a_model_that_is_wrapped_already_is_not_wrapped_again(tmp_path: Path) -> None:
    model = llama()
    model, optimizer = wrapped(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    given: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA[:8]}
    with pytest.raises(ValueError, match="leave strata= out"):
        Mixed(model, arguments(tmp_path), strata={"memory": SMALL}, **given)
    with pytest.raises(ValueError, match=r"pass optimizers=\(optimizer, None\)"):
        Mixed(model, arguments(tmp_path), **given).train()
    trainer = Mixed(model, arguments(tmp_path), optimizers=(optimizer, None), **given)
    trainer.train()
    trainer.train()
    with pytest.raises(TypeError, match="strata= must be a dictionary"):
        Mixed(llama(), arguments(tmp_path), strata="8GiB", **given)
