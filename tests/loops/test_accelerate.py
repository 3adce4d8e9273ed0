"""Loops written for Accelerate, over a wrapped model and over a plain one."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from strata._runtime.wrapped import Wrapped
from toys import llama, rows, same, some, wrapped
from transformers import Trainer, TrainingArguments

TOKENS = torch.stack([row["input_ids"] for row in rows(16)])


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its precision for the whole process."""
    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def train(
    over: bool,
    folder: Path | None = None,
    resume: Path | None = None,
    clip: str = "norm",
    **more: Any,
) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **more)
    model = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if over:
        model, optimizer = wrapped(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = torch.utils.data.DataLoader(TOKENS, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume is not None:
        accelerator.load_state(str(resume))
    losses = []
    for epoch in range(2):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 1e-3)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if folder is not None and epoch == 0:
            accelerator.save_state(str(folder))
    if folder is not None:
        accelerator.save_model(model, str(folder / "model"))
    return losses


@pytest.mark.parametrize("clip", some(["norm", "value", "none"], "norm"))
def test_accumulation_and_clipping(clip: str) -> None:
    assert same(train(False, clip=clip), train(True, clip=clip), 1e-5)


def test_16_bit_precision() -> None:
    plain = train(False, mixed_precision="bf16")
    AcceleratorState._reset_state(True)
    assert same(plain, train(True, mixed_precision="bf16"), 1e-3)


def test_states_are_saved_and_gone_on_from(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "strata")]
    whole = [train(over, folder) for over, folder in enumerate(folders)]
    assert same(*whole, 1e-5)
    names = [sorted(p.name for p in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    again = [train(bool(over), resume=folder) for over, folder in enumerate(folders)]
    assert same(again[1][:8], whole[1][8:], 0)
    assert same(again[0], again[1], 1e-5)
    crossed = train(True, resume=folders[0])  # what the plain run saved
    assert same(crossed, again[0], 1e-5)
    models = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    assert models[0].keys() == models[1].keys()


def accelerate_saves(model: Any, optimizer: Any, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(input_ids=TOKENS[:2], labels=TOKENS[:2]).loss
    accelerator.backward(loss)
    optimizer.step()
    accelerator.prepare(optimizer.optimizer)  # it moves the state to its device and loads it
    accelerator.save_state(str(folder))


def trainer_saves(model: Any, optimizer: Any, folder: Path) -> None:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, args, train_dataset=rows(8), optimizers=(optimizer, None)).train()


@pytest.mark.parametrize("saves", [accelerate_saves, trainer_saves])
def test_states_are_saved_one_tensor_at_a_time(
    saves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    read = Wrapped.read

    def counted(state: Wrapped, index: int, kind: Any = "master") -> torch.Tensor:
        value = read(state, index, kind)
        made.append(weakref.ref(value))
        alive.append(sum(one() is not None for one in made))
        return value

    model = llama()
    model, optimizer = wrapped(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    monkeypatch.setattr(Wrapped, "read", counted)
    saves(model, optimizer, tmp_path)
    assert max(alive) <= 2  # the last one, and the next
    monkeypatch.undo()
    files = [*tmp_path.rglob("optimizer*.pt"), *tmp_path.rglob("optimizer*.bin")]
    moments = 2 * len(list(model.parameters()))
    assert len(made) == moments * len(files)  # Accelerate writes what it was given twice twice
    saved = torch.load(files[0], weights_only=True)["state"]
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(saved[number][name], value) for name, value in entry.items())
